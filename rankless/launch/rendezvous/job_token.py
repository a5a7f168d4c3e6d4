"""The job's token, by which its hosts know each other: never on a command line, never sent on the control channel."""

import contextlib
import os
import secrets
from pathlib import Path
from typing import Protocol

from rankless.config.environment import user_token_file
from rankless.config.run_config import Cluster
from rankless.errors import ConfigError

LEAST_BYTES = 16
NO_TOKEN = b""
FIX = (
    "head -c 32 /dev/urandom > token; chmod 600 token; bring it to every host and set RANKLESS_TOKEN_FILE to its path; "
    "or, in a network that you trust, --insecure (insecure=True)"
)


class TokenSource(Protocol):
    """Where a host that comes to host 0 has the token from."""

    def current(self) -> bytes | None:
        """The token, or None while it is not there."""
        ...

    def refused(self) -> bool:
        """Host 0 has another: whether that may still come."""
        ...

    def used(self) -> None:
        """The job has begun."""
        ...


class FixedToken:
    """A token that is there."""

    def __init__(self, token: bytes) -> None:
        self._token = token

    def current(self) -> bytes:
        """The token."""
        return self._token

    def refused(self) -> bool:
        """No other will come."""
        return False

    def used(self) -> None:
        """It stays where it is."""


class DeliveredToken:
    """A token that host 0 brings by ssh into a file of this user; one of an earlier job may lie there still."""

    def __init__(self, cluster: Cluster) -> None:
        self._path = Path.home() / folder_of_tokens() / name_of_token(cluster)

    def current(self) -> bytes | None:
        """What the file holds."""
        with contextlib.suppress(OSError):
            if self._path.stat().st_uid == os.getuid():
                return self._path.read_bytes().strip() or None
        return None

    def refused(self) -> bool:
        """Take it away: host 0 brings its own again."""
        self.used()
        return True

    def used(self) -> None:
        """Take it away: it was this job's."""
        with contextlib.suppress(OSError):
            self._path.unlink()


def folder_of_tokens() -> str:
    """Below a user's home."""
    return ".cache/rankless"


def name_of_token(cluster: Cluster) -> str:
    """The file's name, the same for all hosts of a job."""
    return f"token-{cluster.hosts[0].address}-{cluster.port}"


def leader_token(cluster: Cluster) -> bytes:
    """The token: that of the file RANKLESS_TOKEN_FILE, else a new one where ssh brings it to the others.

    Raises ConfigError where there is neither, and the job was not said to be insecure.
    """
    path = user_token_file()
    if path is not None:
        return read_token(path)
    if cluster.insecure:
        return NO_TOKEN
    if cluster.agent_start == "manual":
        raise no_token()
    return secrets.token_hex(32).encode()


def follower_token_source(cluster: Cluster) -> TokenSource:
    """What another host than host 0 has."""
    path = user_token_file()
    if path is not None:
        return FixedToken(read_token(path))
    if cluster.insecure:
        return FixedToken(NO_TOKEN)
    if cluster.agent_start == "script":
        return DeliveredToken(cluster)
    raise no_token()


def needs_token_delivery(cluster: Cluster) -> bool:
    """Whether host 0 brings the token to the others."""
    return cluster.agent_start == "script" and not cluster.insecure and user_token_file() is None


def no_token() -> ConfigError:
    """For a host that was started by hand without one."""
    return ConfigError(
        expected="a token that all hosts of the job share, for whoever starts it by hand",
        found="no RANKLESS_TOKEN_FILE in the environment",
        fix=FIX,
    )


def read_token(path: str) -> bytes:
    """The token in a file. Raises ConfigError for one that cannot be read, or is too short."""
    try:
        with open(path, "rb") as file:
            token = file.read(4096).strip()
    except OSError as error:
        raise ConfigError(
            expected="the file that RANKLESS_TOKEN_FILE names", found=f"{path}: {error.strerror}", fix="check the path"
        ) from None
    if len(token) < LEAST_BYTES:
        raise ConfigError(
            expected=f"a token of at least {LEAST_BYTES} bytes in {path}",
            found=f"{len(token)} bytes",
            fix=f"head -c 32 /dev/urandom > {path}, and bring it to every host",
        )
    return token

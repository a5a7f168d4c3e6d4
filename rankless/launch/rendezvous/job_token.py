"""The job's token, with which its hosts authenticate each other.

The token never appears on a command line, and no host sends it over the control channel.
"""

import contextlib
import hashlib
import hmac
import os
import secrets
from pathlib import Path
from typing import Protocol

from rankless.config.environment import user_token_file
from rankless.config.run_config import Cluster
from rankless.errors import ConfigError

MIN_TOKEN_BYTES = 16
NO_TOKEN = b""
TOKEN_FOLDER = ".cache/rankless"
"""Where ssh delivers tokens, below a user's home."""
_FIX = (
    "head -c 32 /dev/urandom > token; chmod 600 token; copy it to every host and set RANKLESS_TOKEN_FILE to its path; "
    "or, in a network that you trust, --insecure (insecure=True)"
)


class TokenSource(Protocol):
    """Where a host that joins host 0 gets the token from."""

    def read(self) -> bytes | None:
        """Return the token, or None while there is none."""
        ...

    def discard_rejected(self) -> bool:
        """Drop a token that host 0 has rejected. Returns whether another one may arrive."""
        ...

    def discard(self) -> None:
        """Drop the token, because the job has started."""
        ...


class FixedToken:
    """A token that exists from the start and stays."""

    def __init__(self, token: bytes) -> None:
        self._token = token

    def read(self) -> bytes:
        """Return the token."""
        return self._token

    def discard_rejected(self) -> bool:
        """Return False: no other token will arrive."""
        return False

    def discard(self) -> None:
        """Do nothing."""


class DeliveredToken:
    """A token that host 0 delivers by ssh into a file of this user. The file may still hold an earlier job's token.

    In a step of Slurm host 0 writes the file itself, since the hosts of a cluster share the home folders.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._path = Path.home() / TOKEN_FOLDER / token_file_name(cluster)
        self._is_shared = cluster.agent_start == "slurm"

    def write(self, token: bytes) -> None:
        """Write the token, for this user alone."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(token)
        new.replace(self._path)

    def read(self) -> bytes | None:
        """Return the content of the file, if this user owns it."""
        with contextlib.suppress(OSError):
            if self._path.stat().st_uid == os.getuid():
                return self._path.read_bytes().strip() or None
        return None

    def discard_rejected(self) -> bool:
        """Delete the file, unless host 0 has replaced it by now. Host 0 delivers its own token again."""
        if not self._is_shared:
            self.discard()
        return True

    def discard(self) -> None:
        """Delete the file."""
        with contextlib.suppress(OSError):
            self._path.unlink()


def token_file_name(cluster: Cluster) -> str:
    """Return the name of the delivered file, the same on all hosts of a job."""
    return f"token-{cluster.hosts[0].address}-{cluster.port}"


def make_leader_token(cluster: Cluster) -> bytes:
    """Return host 0's token: from the file RANKLESS_TOKEN_FILE, or a new one that the other hosts get.

    Raises `ConfigError` if neither is possible and the job is not insecure.
    """
    path = user_token_file()
    if path is not None:
        return read_token(path)
    if cluster.insecure:
        return NO_TOKEN
    if cluster.agent_start == "manual":
        raise make_missing_token_error()
    token = secrets.token_hex(32).encode()
    if cluster.agent_start == "slurm":
        DeliveredToken(cluster).write(token)
    return token


def make_follower_token_source(cluster: Cluster) -> TokenSource:
    """Return where a host other than host 0 gets the token from. Raises `ConfigError` if there is no source."""
    path = user_token_file()
    if path is not None:
        return FixedToken(read_token(path))
    if cluster.insecure:
        return FixedToken(NO_TOKEN)
    if cluster.agent_start in ("script", "slurm"):
        return DeliveredToken(cluster)
    raise make_missing_token_error()


def derive_role_token(token: bytes, role: str, salt: str) -> str:
    """Return the token of the processes of a role, which every host of the run computes from its own copy of `token`.

    So no host sends it. In a job without a token it is no secret for those who read the network.

    Args:
        token: The job's token.
        role: The name of the role.
        salt: The random text on which the hosts have agreed, in `AgreedProcesses`.
    """
    return hmac.digest(token, f"rankless {role}{salt}".encode(), hashlib.sha256).hex()


def derive_store_token(token: bytes, run_id: str) -> str:
    """Return the token of a run's store, which every host computes as those of roles."""
    return hmac.digest(token, b"rankless store" + run_id.encode(), hashlib.sha256).hex()


def needs_token_delivery(cluster: Cluster) -> bool:
    """Whether host 0 delivers the token to the other hosts."""
    return cluster.agent_start == "script" and not cluster.insecure and user_token_file() is None


def make_missing_token_error() -> ConfigError:
    """Return the error for a host that the user has started without a token."""
    return ConfigError(
        expected="a token that all hosts of the job share, because the job is started by hand on each",
        found="no RANKLESS_TOKEN_FILE in the environment",
        fix=_FIX,
    )


def read_token(path: str) -> bytes:
    """Return the token in a file. Raises `ConfigError` if the file cannot be read or the token is too short."""
    try:
        with open(path, "rb") as file:
            token = file.read(4096).strip()
    except OSError as error:
        raise ConfigError(
            expected="the file that RANKLESS_TOKEN_FILE names", found=f"{path}: {error.strerror}", fix="check the path"
        ) from None
    if len(token) < MIN_TOKEN_BYTES:
        raise ConfigError(
            expected=f"a token of at least {MIN_TOKEN_BYTES} bytes in {path}",
            found=f"{len(token)} bytes",
            fix=f"head -c 32 /dev/urandom > {path}, and copy it to every host",
        )
    return token

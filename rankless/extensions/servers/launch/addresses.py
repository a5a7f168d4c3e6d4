"""Chooses the addresses of a run's servers, and holds them until the run has ended."""

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rankless.config.hosts_and_addresses import addresses_of, is_loopback, own_addresses, parse_endpoint
from rankless.errors import ConfigError
from rankless.extensions.servers.config import (
    RequestedServers,
    ServersConfig,
    format_server_address,
    make_servers_config,
)
from rankless.launch.ports import find_port_conflict

MAX_PATH_BYTES = 107
"""The length of the path of a Unix socket on Linux."""
FOLDER_PREFIX = "rankless-servers-"
_LOCK = "lock"


@contextlib.contextmanager
def reserve_server_addresses(servers: RequestedServers) -> Iterator[ServersConfig]:
    """Yield the addresses of the servers of a run on one host and a new token.

    Raises `ConfigError` if an address that the user has given is not free.
    """
    with contextlib.ExitStack() as stack:
        if servers.endpoints:
            addresses = [reserve_address(endpoint, stack) for endpoint in servers.endpoints]
        else:
            folder = stack.enter_context(_private_folder(servers.process_count))
            addresses = [f"ipc://{folder / str(index)}" for index in range(servers.process_count)]
        yield make_servers_config(servers, addresses, secrets.token_hex(32))


def reserve_address(endpoint: str, stack: contextlib.ExitStack, *, outward: str | None = None) -> str:
    """Return ZeroMQ's address of an endpoint HOST:PORT, or HOST for a free port, which `stack` holds.

    A socket holds it that is bound and does not listen: the server may listen on its port, and no other process.

    Args:
        endpoint: What the user has given.
        stack: Its end releases the address.
        outward: In a run on several hosts this host's address on its route to the others. It takes the place of a
            loopback address, which a host may have under its own name.

    Raises:
        ConfigError: The address is not free, or is no address of this host.
    """
    wanted = parse_endpoint(endpoint)
    address = _choose_address(wanted.host, outward)
    conflict = None if wanted.port is None else find_port_conflict(wanted.port, address)
    held = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM))
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((address, wanted.port or 0))
    except OSError as error:
        conflict = conflict or (error.strerror or str(error)).lower()
    if conflict is not None:
        raise ConfigError(
            expected=f"{endpoint} of --servers to be free, because a server listens there",
            found=conflict,
            fix="end that process, or give another port, or the address without a port to get a free one",
        )
    return format_server_address(*held.getsockname()[:2])


def _choose_address(host: str, outward: str | None) -> str:
    """Return the numeric address at which a server binds: ZeroMQ binds to no others."""
    found = addresses_of(host)
    if outward is not None:
        found = frozenset(each for each in found & own_addresses() if not is_loopback(each)) or frozenset({outward})
    return min(found, key=lambda each: (":" in each, each), default=host)


@contextlib.contextmanager
def _private_folder(count: int) -> Iterator[Path]:
    """Yield a new folder that only this user may enter. It is removed at the end, with all sockets in it."""
    parent = _find_parent(count)
    _remove_abandoned(parent)
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=parent))
    try:
        with _locked(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _find_parent(count: int) -> Path:
    """Return a folder for temporary files in which the paths of sockets are short enough."""
    longest = f"/{FOLDER_PREFIX}12345678/{count - 1}"
    for name in (tempfile.gettempdir(), "/tmp", "/dev/shm"):
        if len(os.fsencode(name + longest)) <= MAX_PATH_BYTES and os.access(name, os.W_OK | os.X_OK):
            return Path(name)
    raise ConfigError(
        expected=f"a folder for sockets whose paths have at most {MAX_PATH_BYTES} bytes",
        found=tempfile.gettempdir(),
        fix="set TMPDIR to a folder with a shorter path",
    )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock that ends with this process, so that a later run recognizes the folder of a run that was killed."""
    new = folder / f"{_LOCK}.new"
    with open(new, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        new.rename(folder / _LOCK)
        yield


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of this user's runs whose agent was killed."""
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid != os.getuid():
                continue
            with open(folder / _LOCK, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)

"""The ports that the workers of a run need, and the processes that have a port."""

import errno
import socket

import psutil  # type: ignore[import-untyped]  # it has no stubs

from rankless.config.hosts_and_addresses import address_family
from rankless.errors import ConfigError

_ADDRESS = "127.0.0.1"
_IN_USE = (psutil.CONN_LISTEN, psutil.CONN_ESTABLISHED)


def open_store_socket(address: str = _ADDRESS) -> socket.socket:
    """Return a socket that listens on `address` only, for the store of all ranks.

    Ranks that connect before the store is served wait in its queue instead of trying again.
    """
    store = socket.socket(address_family(address), socket.SOCK_STREAM)
    store.bind((address, 0))
    store.listen(1024)
    return store


def reserve_master_port(port: int | None = None) -> socket.socket:
    """Return a socket that reserves MASTER_PORT (`port`, or a free one) for scripts that make their own group.

    The socket is bound and does not listen. So the system gives the number to no other process, while a socket that
    also sets SO_REUSEADDR, as torch's store does, may listen on it. Raises `ConfigError` if the port is taken.
    """
    if port is not None and (why := find_port_conflict(port)) is not None:
        raise _port_error(port, why)
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reserved.bind(("", port or 0))
    except OSError as error:
        reserved.close()
        raise _port_error(port, _reason(error)) from error
    return reserved


def require_own_address(address: str) -> None:
    """Raise `ConfigError` unless MASTER_ADDR is an address of this host, which runs rank 0."""
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(
            expected=f"a host name that can be looked up: {address}",
            found=str(error),
            fix="omit --master-addr, because all workers are on this host; or correct the name",
        ) from error
    for family, kind, protocol, _, socket_address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind((socket_address[0], 0, *socket_address[2:]))
            except OSError:
                continue
            return
    raise ConfigError(
        expected=f"--master-addr to be an address of this host, which runs rank 0: {address}",
        found=f"{found[0][4][0]}, which is not one of its addresses",
        fix="omit --master-addr, or run this command on that host",
    )


def find_port_conflict(port: int, address: str = "") -> str | None:
    """Return why a port of this host, or of one of its addresses, is not free ("taken by process 7: …"), or None."""
    # Without SO_REUSEADDR, with which two runs could reserve the same number.
    with socket.socket(address_family(address), socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return _reason(error)
            owner = describe_port_owner(port)
            return None if owner is None else f"taken by {owner}"
    return None


def describe_port_owner(port: int) -> str | None:
    """Return which process has a port; None if only closed connections linger there."""
    try:
        using = [each for each in psutil.net_connections("tcp") if each.laddr and each.laddr.port == port]
    except psutil.Error:
        return "another process, which this user may not look up"
    if not using:
        return "a process that reserves it without listening, as another rankless run does"
    active = [each for each in using if each.pid is not None or each.status in _IN_USE]
    if not active:
        return None
    active.sort(key=lambda each: each.status != psutil.CONN_LISTEN)
    process_id = active[0].pid
    if process_id is None:
        return "a process of another user"
    try:
        process = psutil.Process(process_id)
        command = " ".join(process.cmdline()).rstrip() or process.name()
    except psutil.Error:
        command = "which has just ended"
    return f"process {process_id}: {command[:200]}"


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _port_error(port: int | None, found: str) -> ConfigError:
    return ConfigError(
        expected="a port of this host to be free" if port is None else f"the requested port {port} to be free",
        found=found,
        fix="omit --master-port to get a free one; or end that process; or choose another port",
    )

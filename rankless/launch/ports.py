"""The two ports that the workers of a run need, and who has one that is taken."""

import errno
import socket

import psutil  # type: ignore[import-untyped]  # it has no stubs

from rankless.errors import ConfigError

_ADDRESS = "127.0.0.1"
_IN_USE = (psutil.CONN_LISTEN, psutil.CONN_ESTABLISHED)


def open_store_socket(address: str = _ADDRESS) -> socket.socket:
    """A socket that listens on that address only, for the store of our group, which rank 0 will serve.

    It listens already, so ranks that come before rank 0 wait in its queue instead of trying again.
    """
    store = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    store.bind((address, 0))
    store.listen(1024)
    return store


def reserve_master_port(port: int | None = None) -> socket.socket:
    """A socket that keeps MASTER_PORT (a free one, unless it is given) from everybody but a script that makes its own
    group with it. Raises ConfigError if somebody has it.

    It is bound and does not listen, so the system gives the number to nobody else, while one socket that
    also sets SO_REUSEADDR, as torch's store does, may listen on it.
    """
    if port is not None:
        _require_free(port)
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reserved.bind(("", port or 0))
    except OSError as error:
        reserved.close()
        raise _refused(port, _reason(error)) from error
    return reserved


def require_own_address(address: str) -> None:
    """Raise ConfigError unless MASTER_ADDR is an address of this host, where rank 0 is."""
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(
            expected=f"a host name that can be looked up: {address}",
            found=str(error),
            fix="leave --master-addr away, all workers are on this host; or correct the name",
        ) from error
    for family, kind, protocol, _, place in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind((place[0], 0, *place[2:]))
            except OSError:
                continue
            return
    raise ConfigError(
        expected=f"--master-addr to be this host's, where rank 0 runs: {address}",
        found=f"{found[0][4][0]}, which is none of its addresses",
        fix="leave --master-addr away, or run this on that host",
    )


def taken_by(port: int, address: str = "") -> str | None:
    """Why a port of this host (of one address of it) cannot be had, as "taken by process 7: …"; None if it is free."""
    # Without SO_REUSEADDR: two runs that reserve the same number would both succeed with it.
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return _reason(error)
            owner = owner_of(port)
            return None if owner is None else f"taken by {owner}"
    return None


def _require_free(port: int) -> None:
    if (why := taken_by(port)) is not None:
        raise _refused(port, why)


def owner_of(port: int) -> str | None:
    """Who has a port, in words; None if only connections linger there whose processes are done with them."""
    try:
        using = [each for each in psutil.net_connections("tcp") if each.laddr and each.laddr.port == port]
    except psutil.Error:
        return "another process, which this user may not look up"
    if not using:
        return "a process that reserves it without listening, as another rankless run does"
    lasting = [each for each in using if each.pid is not None or each.status in _IN_USE]
    if not lasting:
        return None
    lasting.sort(key=lambda each: each.status != psutil.CONN_LISTEN)
    process_id = lasting[0].pid
    if process_id is None:
        return "a process of another user"
    try:
        process = psutil.Process(process_id)
        words = " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        words = "which has just ended"
    return f"process {process_id}: {words[:200]}"


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _refused(port: int | None, found: str) -> ConfigError:
    return ConfigError(
        expected="a port of this host to be free" if port is None else f"port {port} to be free, as it was asked for",
        found=found,
        fix="leave --master-port away: a free one is found; or end that process, or choose another port",
    )

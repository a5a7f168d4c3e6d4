"""Opens TCP connections to other hosts, says why one cannot be opened, and probes hosts that have not joined.

Note [late connect errors]: if a host has no route, `connect` with a timeout returns without an error in about one of
250 calls. Linux releases the socket a moment before it sets the error, and Python checks in between. The socket then
has no peer, and its error can be read a moment later.
"""

import errno
import socket
import threading
import time

from rankless.config.run_config import Cluster


class HostUnreachableError(Exception):
    """No address of a host accepts a connection.

    `code` is the `errno` of the address that came closest. It is None if the name has no address.
    """

    def __init__(self, code: int | None) -> None:
        super().__init__(code)
        self.code = code

    @property
    def has_no_route(self) -> bool:
        """Whether this host has no route to the other one."""
        return self.code in (errno.EHOSTUNREACH, errno.ENETUNREACH)

    @property
    def was_refused(self) -> bool:
        """Whether the host is up, but no process listens at the port."""
        return self.code == errno.ECONNREFUSED

    @property
    def has_timed_out(self) -> bool:
        """Whether no answer arrived in time."""
        return self.code == errno.ETIMEDOUT

    def __str__(self) -> str:
        return "no address" if self.code is None else errno.errorcode.get(self.code, str(self.code))


def open_connection(address: str, port: int, *, timeout_seconds: float) -> socket.socket:
    """Connect to the first address of a name that answers in time. Raises `HostUnreachableError`."""
    try:
        candidates = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError:
        raise HostUnreachableError(None) from None
    codes: list[int | None] = []
    for family, kind, protocol, _, socket_address in candidates:
        connection = socket.socket(family, kind, protocol)
        connection.settimeout(timeout_seconds)
        try:
            connection.connect(socket_address)
            connection.getpeername()  # Note [late connect errors]
        except TimeoutError:
            codes.append(errno.ETIMEDOUT)
        except OSError as error:
            is_late = error.errno == errno.ENOTCONN
            late_code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if is_late else 0
            codes.append(late_code or error.errno)
        else:
            return connection
        connection.close()
    raise HostUnreachableError(errno.ECONNREFUSED if errno.ECONNREFUSED in codes else codes[-1])


PROBE_TIMEOUT_SECONDS = 2.0
PROBE_INTERVAL_SECONDS = 4.0
SSH_PORT = 22


class ReachabilityProbe:
    """Probes one host repeatedly in a thread, for as long as somebody reads the result."""

    def __init__(self, cluster: Cluster, host_index: int) -> None:
        self._address = cluster.hosts[host_index].address
        self._result: str | None = None
        self._last_read_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"probe of {self._address}", daemon=True)
        self._thread.start()

    def read_result(self) -> str | None:
        """Return the last result as text, or None before the first."""
        self._last_read_at = time.monotonic()
        return self._result

    def _run(self) -> None:
        while time.monotonic() - self._last_read_at < 3 * PROBE_INTERVAL_SECONDS:
            self._result = describe_reachability(self._address)
            time.sleep(PROBE_INTERVAL_SECONDS)


def describe_reachability(address: str) -> str:
    """Return as text whether a host can be reached.

    The probe connects to the host's ssh port. Every host that is up answers it, unless a firewall drops packets.
    """
    try:
        open_connection(address, SSH_PORT, timeout_seconds=PROBE_TIMEOUT_SECONDS).close()
    except HostUnreachableError as error:
        if error.code is None:
            return "its name does not resolve here"
        if error.has_timed_out:
            return "no answer: it is down, or a firewall drops packets to it"
        if error.has_no_route:
            return "no route to it: the host or its network is down"
        if not error.was_refused:
            return str(error)
    return "it is up, but the job is not started there or cannot reach this host"

"""Opens TCP connections to other hosts, and says why one cannot be opened.

Note [late connect errors]: if a host has no route, `connect` with a timeout returns without an error in about one of
250 calls. Linux releases the socket a moment before it sets the error, and Python checks in between. The socket then
has no peer, and its error can be read a moment later.
"""

import errno
import socket


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

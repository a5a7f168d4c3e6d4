"""Connecting to another host, and what it means if that fails.

Note [not connected]: where no way leads to a host, about one in 250 calls of `connect` with a timeout returns
as if there were a connection: Linux lets go of the socket a moment before it tells the error, and Python asks in
between. The socket has no other end then, and its error is there now.
"""

import errno
import socket


class HostUnreachableError(Exception):
    """Nobody was reached. `code` is the system's, of the address that came nearest; None if the name has no
    address.
    """

    def __init__(self, code: int | None) -> None:
        super().__init__(code)
        self.code = code

    @property
    def has_no_way(self) -> bool:
        """Whether no way leads there."""
        return self.code in (errno.EHOSTUNREACH, errno.ENETUNREACH)

    @property
    def was_refused(self) -> bool:
        """Whether a host is there, and nobody listens at the port."""
        return self.code == errno.ECONNREFUSED

    @property
    def was_dropped(self) -> bool:
        """Whether no answer came."""
        return self.code == errno.ETIMEDOUT

    def __str__(self) -> str:
        return "no address" if self.code is None else errno.errorcode.get(self.code, str(self.code))


def connected(address: str, port: int, *, timeout_seconds: float) -> socket.socket:
    """A connection by the first address of a name that answers in time. Raises HostUnreached."""
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError:
        raise HostUnreachableError(None) from None
    codes: list[int | None] = []
    for family, kind, protocol, _, place in found:
        connection = socket.socket(family, kind, protocol)
        connection.settimeout(timeout_seconds)
        try:
            connection.connect(place)
            connection.getpeername()  # Note [not connected]
        except TimeoutError:
            codes.append(errno.ETIMEDOUT)
        except OSError as error:
            is_late = error.errno == errno.ENOTCONN
            late = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if is_late else 0
            codes.append(late or error.errno)
        else:
            return connection
        connection.close()
    raise HostUnreachableError(errno.ECONNREFUSED if errno.ECONNREFUSED in codes else codes[-1])

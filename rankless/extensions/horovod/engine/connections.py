"""Non-blocking connections between every rank and rank 0, which carry whole messages.

A frame consists of the length of the message, the length of the values that follow it, the message and the values.
"""

import select
import socket
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from itertools import islice

from rankless.records.framing import FrameDecoder, FrameFormat, FrameTooLongError

FRAME_FORMAT = FrameFormat("<II")
MAX_MESSAGE_BYTES = 16 << 20
MAX_VALUE_BYTES = 64 << 20
BUFFER_BYTES = 1 << 20
CLOSE_SECONDS = 1.0
"""How long `close_gracefully` waits for the other sides."""
MAX_MESSAGES_PER_SEND = 256
"""The operating system accepts 1024 in one call."""


class ConnectionClosed(Exception):
    """The other side has closed the connection."""


class RankConnection:
    """One connection. It keeps what it cannot send at once, and `flush` sends it."""

    def __init__(self, connection: socket.socket, *, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        """Take over a connected socket.

        Args:
            connection: The socket.
            max_bytes: The longest message that is accepted, until `accept_long_messages`.
        """
        connection.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        values = MAX_VALUE_BYTES if max_bytes == MAX_MESSAGE_BYTES else 0
        self._incoming = FrameDecoder(FRAME_FORMAT, max_bytes=max_bytes, max_attachment_bytes=values)
        self._outgoing: deque[memoryview] = deque()
        self.is_closed = False

    def accept_long_messages(self) -> None:
        """Accept messages of any kind from now on: the other side has shown that it knows the token."""
        self._incoming.max_bytes, self._incoming.max_attachment_bytes = MAX_MESSAGE_BYTES, MAX_VALUE_BYTES

    def fileno(self) -> int:
        """Return the socket's file descriptor."""
        return self._socket.fileno()

    @property
    def has_more_to_send(self) -> bool:
        """Whether messages wait for `flush`."""
        return bool(self._outgoing)

    def send(self, message: bytes, values: Sequence[bytes] = ()) -> None:
        """Send a message. Raises ConnectionClosed."""
        self.enqueue(message, values)
        self.flush()

    def enqueue(self, message: bytes, values: Sequence[bytes] = ()) -> None:
        """Keep a message for the next `flush`, which sends it together with others."""
        self._outgoing.append(memoryview(FRAME_FORMAT.encode_with_attachment(message, *values)))

    def flush(self) -> None:
        """Send the kept messages as far as the other side accepts them. Raises ConnectionClosed."""
        try:
            while self._outgoing:
                sent = self._socket.sendmsg(list(islice(self._outgoing, MAX_MESSAGES_PER_SEND)))
                while sent:
                    data = self._outgoing.popleft()
                    if sent < len(data):
                        self._outgoing.appendleft(data[sent:])
                    sent -= min(sent, len(data))
        except BlockingIOError:
            return
        except OSError as error:
            self.is_closed = True
            raise ConnectionClosed(str(error)) from None

    def receive(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the messages that have arrived, then raise ConnectionClosed if no more can arrive."""
        try:
            while data := self._socket.recv(BUFFER_BYTES):
                self._incoming.feed(data)
                if len(data) < BUFFER_BYTES:
                    break
            else:
                self.is_closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.is_closed = True
        try:
            yield from self._incoming.messages_with_attachments()
        except FrameTooLongError:
            raise ConnectionClosed("the other side sent no message of the Horovod engine") from None
        if self.is_closed:
            raise ConnectionClosed("the connection was closed")

    def shut_down_sending(self) -> None:
        """Send the kept messages as far as possible, then the end of the stream."""
        with suppress(ConnectionClosed):
            self.flush()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def drain(self) -> bool:
        """Discard what has arrived. Returns whether the other side has closed the connection."""
        try:
            while data := self._socket.recv(BUFFER_BYTES):
                del data
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def close(self) -> None:
        """Close the connection, after sending the kept messages as far as possible."""
        with suppress(ConnectionClosed):
            self.flush()
        self._socket.close()


def close_gracefully(connections: Collection[RankConnection]) -> None:
    """Close connections once the other sides have closed them, too, or after a timeout.

    Closing a connection with unread data would reset it, and the other side would lose the last messages.
    """
    deadline = time.monotonic() + CLOSE_SECONDS
    still_open = list(connections)
    for connection in still_open:
        connection.shut_down_sending()
    while (left := deadline - time.monotonic()) > 0:
        still_open = [connection for connection in still_open if not connection.drain()]
        if not still_open:
            break
        select.select(still_open, [], [], left)
    for connection in connections:
        connection.close()

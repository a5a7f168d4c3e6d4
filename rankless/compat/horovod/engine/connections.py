"""Connections between every rank and rank 0: whole messages, out and in, without ever waiting.

A message is a length of what is said, a length of the values behind it, what is said, and the values.
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
MOST_SAID = 16 << 20
MOST_VALUES = 64 << 20
BUFFER_BYTES = 1 << 20
LEAVING_SECONDS = 1.0
MOST_AT_ONCE = 256
"""Messages in one call of the operating system's; it takes 1024."""


class Closed(Exception):
    """The other side has gone."""


class Link:
    """One connection. What cannot be sent at once is kept, and sent by `flush`."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._incoming = FrameDecoder(FRAME_FORMAT, max_bytes=MOST_SAID, max_attachment_bytes=MOST_VALUES)
        self._outgoing: deque[memoryview] = deque()
        self.is_closed = False

    def fileno(self) -> int:
        """The connection's."""
        return self._socket.fileno()

    @property
    def has_more_to_send(self) -> bool:
        """Whether something is kept."""
        return bool(self._outgoing)

    def send(self, said: bytes, values: Sequence[bytes] = ()) -> None:
        """Send a message. Raises Closed."""
        self.keep(said, values)
        self.flush()

    def keep(self, said: bytes, values: Sequence[bytes] = ()) -> None:
        """Let a message go with the next `flush`, together with others."""
        self._outgoing.append(memoryview(FRAME_FORMAT.encode_with_attachment(said, *values)))

    def flush(self) -> None:
        """Send what is kept, as far as the other side takes it. Raises Closed."""
        try:
            while self._outgoing:
                sent = self._socket.sendmsg(list(islice(self._outgoing, MOST_AT_ONCE)))
                while sent:
                    data = self._outgoing.popleft()
                    if sent < len(data):
                        self._outgoing.appendleft(data[sent:])
                    sent -= min(sent, len(data))
        except BlockingIOError:
            return
        except OSError as error:
            self.is_closed = True
            raise Closed(str(error)) from None

    def receive(self) -> Iterator[tuple[bytes, bytes]]:
        """The messages that have come. Raises Closed once there are none and there will be none."""
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
            raise Closed("what comes is no message of ours") from None
        if self.is_closed:
            raise Closed("the connection was closed")

    def say_no_more(self) -> None:
        """Send what is kept, as far as it goes, and let the other side know that it was the last."""
        with suppress(Closed):
            self.flush()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def is_over(self) -> bool:
        """Drop what has come; whether nothing will come any more."""
        try:
            while data := self._socket.recv(BUFFER_BYTES):
                del data
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def close(self) -> None:
        """Close it, with what can still be sent at once."""
        with suppress(Closed):
            self.flush()
        self._socket.close()


def see_off(links: Collection[Link]) -> None:
    """Close links once their other sides have closed theirs, too, or do not in time.

    Closing a connection in which something is unread would reset it, and the last words to the other side be lost.
    """
    deadline = time.monotonic() + LEAVING_SECONDS
    open_links = list(links)
    for link in open_links:
        link.say_no_more()
    while (left := deadline - time.monotonic()) > 0:
        open_links = [link for link in open_links if not link.is_over()]
        if not open_links:
            break
        select.select(open_links, [], [], left)
    for link in links:
        link.close()

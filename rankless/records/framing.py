"""Length-prefixed frames: they divide a byte stream, or a file, into messages.

A frame is a header, then a message, then in some formats an attachment. The header holds the length of each. Sockets
that keep the boundaries of messages (datagrams and sequenced packets) need no frames.
"""

import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_RECEIVE_BYTES = 1 << 20


class FrameTooLongError(ValueError):
    """A header announces `length` bytes, more than the reader accepts."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.length = length


class FrameFormat:
    """The header of a stream's frames: a `struct` format with one unsigned integer, or two with an attachment."""

    def __init__(self, header: str) -> None:
        header_struct = struct.Struct(header)
        self.header_bytes = header_struct.size
        self.pack_header = header_struct.pack
        self.unpack_header = header_struct.unpack_from

    def encode(self, message: bytes) -> bytes:
        """Return the frame of a message, in a format without attachments."""
        return self.pack_header(len(message)) + message

    def encode_with_attachment(self, message: bytes, *pieces: bytes) -> bytes:
        """Return the frame of a message whose attachment is the concatenation of `pieces`."""
        header = self.pack_header(len(message), sum(map(len, pieces)))
        return b"".join((header, message, *pieces))


class FrameDecoder:
    """Collects the bytes of a stream as they arrive, and yields the frames that are complete."""

    def __init__(self, frame_format: FrameFormat, *, max_bytes: int, max_attachment_bytes: int = 0) -> None:
        self._format = frame_format
        self._buffer = bytearray()
        self.max_bytes = max_bytes
        """The longest message that the reader accepts. It may change between two frames."""
        self.max_attachment_bytes = max_attachment_bytes

    @property
    def buffered_bytes(self) -> int:
        """How many bytes wait to be decoded."""
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        """Add bytes that have arrived."""
        self._buffer += data

    def clear(self) -> None:
        """Drop everything that has arrived."""
        self._buffer.clear()

    def messages(self) -> Iterator[bytes]:
        """Yield the message of each complete frame. Raises `FrameTooLongError` as soon as a header is out of limits."""
        return (message for message, _ in self.messages_with_attachments())

    def messages_with_attachments(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the message and the attachment of each complete frame, under the same rules; b"" for no attachment."""
        buffer, header_bytes, unpack_header = self._buffer, self._format.header_bytes, self._format.unpack_header
        start = 0
        try:
            while len(buffer) - start >= header_bytes:
                length, *attachment = unpack_header(buffer, start)
                attachment_length = sum(attachment)  # a format without attachments has no second number
                if length > self.max_bytes or attachment_length > self.max_attachment_bytes:
                    raise FrameTooLongError(max(length, attachment_length))
                begin = start + header_bytes
                middle = begin + length
                end = middle + attachment_length
                if len(buffer) < end:
                    break
                start = end
                yield bytes(buffer[begin:middle]), bytes(buffer[middle:end])
        finally:
            del buffer[:start]


def read_messages(path: Path, frame_format: FrameFormat) -> Iterator[bytes]:
    """Yield the message of each frame of a file, except an incomplete last one."""
    with path.open("rb") as stream:
        while len(header := stream.read(frame_format.header_bytes)) == frame_format.header_bytes:
            (length,) = frame_format.unpack_header(header)
            message = stream.read(length)
            if len(message) < length:
                return
            yield message


def receive_message(connection: socket.socket, frame_format: FrameFormat) -> bytes | None:
    """Read one message from a blocking socket. Returns None if the other end closes before its end."""
    header = receive_exactly(connection, frame_format.header_bytes)
    return None if header is None else receive_exactly(connection, *frame_format.unpack_header(header))


def receive_exactly(connection: socket.socket, size: int) -> bytes | None:
    """Read `size` bytes from a blocking socket. Returns None if the other end closes first."""
    data = bytearray()
    while len(data) < size:
        try:
            piece = connection.recv(min(size - len(data), _RECEIVE_BYTES))
        except ConnectionResetError:
            return None
        if not piece:
            return None
        data += piece
    return bytes(data)

"""The channel from workers to their agent: records as single messages on one socket.

All processes of a host share one socket, so that messages of several processes keep the order in which they were sent.
That order decides which rank the agent finds to be the root cause of a failure.
"""

import contextlib
import socket

import msgspec

from rankless.records.encoding import encode_bounded_msgpack
from rankless.records.events import AnyRecord

# With sequenced packets the reader also sees when the last writer is gone. macOS has datagrams only.
_KIND = getattr(socket, "SOCK_SEQPACKET", None) if hasattr(socket, "SO_PASSCRED") else None
_MAX_RECORD_BYTES = 128 * 1024
"""Neither end has room for a message of any length. The texts of a longer record lose their middles."""


def open_channel() -> tuple[socket.socket, socket.socket]:
    """Open a channel, and return the reader's and the writers' end."""
    reader, writer = socket.socketpair(socket.AF_UNIX, _KIND or socket.SOCK_DGRAM)
    for end in (reader, writer):
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            end.setsockopt(socket.SOL_SOCKET, option, 4 * _MAX_RECORD_BYTES)
    return reader, writer


def send_record(record: AnyRecord, *, descriptor: int, blocking: bool = True) -> None:
    """Send one record. Drops it if the reader is gone, and without `blocking` also if the reader lags."""
    data = encode_bounded_msgpack(record, max_bytes=_MAX_RECORD_BYTES)
    flags = 0 if blocking else socket.MSG_DONTWAIT
    with contextlib.suppress(OSError), socket.socket(fileno=descriptor) as writer:
        try:
            writer.send(data, flags)
        finally:
            writer.detach()


def receive_records(reader: socket.socket) -> tuple[list[AnyRecord], bool]:
    """Return all records that wait on a non-blocking `reader`, and whether the last writer is gone."""
    records: list[AnyRecord] = []
    while True:
        try:
            data = reader.recv(2 * _MAX_RECORD_BYTES)
        except BlockingIOError:
            return records, False
        except ConnectionError:
            return records, True
        if not data:
            return records, True
        with contextlib.suppress(msgspec.MsgspecError):  # a process of the user may write anything to the descriptor
            records.append(msgspec.msgpack.decode(data, type=AnyRecord))

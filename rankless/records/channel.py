"""The way up: records as single messages on one socket that all processes of a host share.

One shared socket, because the order in which records arrive decides who is blamed for a failure: messages
from several processes keep the order in which they were sent.
"""

import contextlib
import socket

import msgspec

from rankless.records.events import AnyRecord

# Sequenced packets also tell the reader when the last writer is gone; macOS has datagrams only.
_KIND = getattr(socket, "SOCK_SEQPACKET", None) if hasattr(socket, "SO_PASSCRED") else None
_LONGEST = 128 * 1024


def open_channel() -> tuple[socket.socket, socket.socket]:
    """The reader's and the writers' end of a new channel."""
    reader, writer = socket.socketpair(socket.AF_UNIX, _KIND or socket.SOCK_DGRAM)
    for end in (reader, writer):
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            end.setsockopt(socket.SOL_SOCKET, option, 4 * _LONGEST)
    return reader, writer


def send_record(record: AnyRecord, *, descriptor: int, blocking: bool = True) -> None:
    """Send one record up. An impatient one is dropped when the reader lags, any when it is gone."""
    data = msgspec.msgpack.encode(record)
    flags = 0 if blocking else socket.MSG_DONTWAIT
    with contextlib.suppress(OSError), socket.socket(fileno=descriptor) as writer:
        try:
            writer.send(data, flags)
        finally:
            writer.detach()


def receive_records(reader: socket.socket) -> tuple[list[AnyRecord], bool]:
    """All records that wait on a non-blocking `reader`, and whether the last writer is gone."""
    records: list[AnyRecord] = []
    while True:
        try:
            data = reader.recv(2 * _LONGEST)
        except BlockingIOError:
            return records, False
        except ConnectionError:
            return records, True
        if not data:
            return records, True
        with contextlib.suppress(msgspec.MsgspecError):  # a user's process may write rubbish to the descriptor
            records.append(msgspec.msgpack.decode(data, type=AnyRecord))

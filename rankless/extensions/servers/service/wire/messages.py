"""The messages between workers and servers: a header of fixed size, then payload frames, which are JSON or raw arrays.

Numbers are little-endian. A message never holds code: whoever sends one can at most be refused.
Errors of a server, and what workers say of others that are lost, are JSON in the first frame.
"""

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import DTypeLike, NDArray

from rankless.errors import RanklessError, ServerError, TableError
from rankless.records.encoding import encode_json

MAGIC = b"RKPS"
VERSION = 1
MOST_MESSAGE_BYTES = 1 << 30
"""In all frames of a message."""
MOST_FRAMES = 5
"""The header and the payload frames."""
MOST_IN_FLIGHT = 16
"""Requests of one worker to one server whose answers it has not acknowledged."""
COPIED_BYTES = 16384
"""Frames up to here are copied when they are sent, which takes less time than to keep them alive."""

JOINT_BYTES = 1 << 20
"""Rows of one table up to here are in a message with those of other tables, which both sides copy."""

MOST_JOINT_TABLES = 1 << 16
"""Tables of one message."""

FOR_TRAINING = 1
"""The flag of a pull whose rows are for a training step: the worker must not be too far ahead of the others."""

PREPARED = 2
"""The flag of a push whose gradients the worker has prepared; see Note [prepared slices] in `transactions`."""

Frame = Any
"""Bytes, a memoryview, or an array in C's order."""

Decoded = TypeVar("Decoded")


class Kind(IntEnum):
    """What a message asks or answers."""

    HELLO = 1
    PROVE = 2
    OPEN = 3
    PUSH = 4
    RESET = 5
    READY = 6
    PULL = 7
    CONTENTS = 8
    CONTENTS_PART = 9
    RESTORE = 10
    RESTORE_PART = 11
    RESTORE_END = 12
    STATISTICS = 13
    LEAVE = 14
    PREPARE = 15
    """A worker's slice of a step, before the step."""
    REGROUP = 16
    """Workers are lost, and the others continue. The payload says which."""
    PUSH_FOR_LOST = 17
    """What a lost worker would have pushed. The payload says which worker, and the number of its change."""
    PULL_SEVERAL = 18
    """A pull from several tables, which the payload names."""
    PUSH_SEVERAL = 19
    """Pushes to several tables, in their order, which the payload names."""
    PREPARE_SEVERAL = 20
    """Slices of several tables, as of `PREPARE`."""
    CHALLENGE = 65
    WELCOME = 66
    DONE = 67
    FAILED = 68
    """The request was understood, and cannot be done. The payload is an error, as `encode_error` makes it."""
    EXPECTED = 69
    """The request has a later number than the next one, which `sequence` names."""
    REFUSED = 70
    """The request was not understood, and nothing has changed. The payload is the reason."""
    NO_SESSION = 71
    """The request came over a connection that has no session, or another one. Nothing has changed."""


class MessageHeader(NamedTuple):
    """The header of a message. Fields that a kind does not use are 0.

    Args:
        kind: See `Kind`.
        flags: Which section, in parts of contents: 0 for rows, 1 for ids that wait for one. In a pull: `FOR_TRAINING`.
            In a push: `PREPARED`.
        table: Number of the table on this server.
        session: Number of the session, which the server has drawn.
        sequence: Number of the request among the worker's to this server, from 1 on. An answer has its request's.
        acknowledged: All answers up to this one have arrived: the server may forget them.
        transaction: Number of the worker's transaction, from 1 on. Of a read: the last one that it must see. In an
            answer: the last one that the server has committed.
        start: First row of a part. Of a reset: how many of them the worker has asked for. In an answer: the table's
            step.
        rows: Number of rows, or of ids.
        payload_bytes: Bytes of all payload frames.
    """

    kind: int
    flags: int = 0
    table: int = 0
    session: int = 0
    sequence: int = 0
    acknowledged: int = 0
    transaction: int = 0
    start: int = 0
    rows: int = 0
    payload_bytes: int = 0


_LAYOUT = struct.Struct("<4sBBHI4xQQQQQQQ")
HEADER_BYTES = _LAYOUT.size


class MessageRefusedError(Exception):
    """A message that is not understood. The text is the reason."""


def encode_header(header: MessageHeader) -> bytes:
    """Return the header's frame."""
    kind, flags, table, *numbers = header
    return _LAYOUT.pack(MAGIC, VERSION, kind, flags, table, *numbers)


def make_message(header: MessageHeader, payload: Sequence[Frame]) -> list[bytes | memoryview]:
    """Return the frames of a message. Empty arrays become empty frames."""
    frames = [_bytes_of(memoryview(frame)) for frame in payload]
    size = sum(len(frame) for frame in frames)
    return [encode_header(header._replace(payload_bytes=size)), *frames]


def _bytes_of(frame: memoryview) -> memoryview | bytes:
    return frame.cast("B") if frame.nbytes else b""  # an empty array cannot be cast


def decode_message(frames: Sequence[memoryview]) -> tuple[MessageHeader, list[memoryview]]:
    """Return the header and the payload frames of a message. Raises MessageRefusedError."""
    if not 1 <= len(frames) <= MOST_FRAMES:
        raise MessageRefusedError("a wrong number of frames")
    if frames[0].nbytes != HEADER_BYTES:
        raise MessageRefusedError("a header of the wrong size")
    magic, version, kind, *numbers = _LAYOUT.unpack(frames[0])
    if magic != MAGIC or version != VERSION:
        raise MessageRefusedError("another protocol or version")
    payload = list(frames[1:])
    header = MessageHeader(kind, *numbers)
    size = sum(frame.nbytes for frame in payload)
    if size > MOST_MESSAGE_BYTES:
        raise MessageRefusedError("a message that is too large")
    if size != header.payload_bytes:
        raise MessageRefusedError("a payload of the wrong size")
    return header, payload


def decode_json(frame: memoryview | bytes, kind: type[Decoded]) -> Decoded:
    """Return what a frame of JSON holds. Raises MessageRefusedError if it is not of the type."""
    try:
        return msgspec.json.decode(frame, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessageRefusedError(f"JSON that is not understood: {error}") from None


def array_of(frame: memoryview, dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return a frame as an array, without a copy if it is aligned. Raises MessageRefusedError for another size."""
    count = 1
    for size in shape:
        count *= size
    if frame.nbytes != count * np.dtype(dtype).itemsize:
        raise MessageRefusedError("an array of the wrong size")
    if count == 0:
        return np.empty(shape, dtype)
    array = np.frombuffer(frame, dtype).reshape(shape)
    # Functions would be compiled once more for arrays that are not aligned, or cannot be written.
    return array if array.flags.aligned and array.flags.writeable else array.copy()


class LostWorkersMessage(msgspec.Struct, frozen=True):
    """What a worker says of others that are lost. `round` is the number of the round of those that are left."""

    lost: list[int]
    round: int


class LostChangeMessage(msgspec.Struct, frozen=True):
    """Whose change a worker sends for a lost one, and its number among those in the transaction."""

    worker: int
    number: int


class CarriedError(msgspec.Struct, frozen=True, kw_only=True):
    """An error on its way to a worker."""

    about_table: bool
    expected: str
    found: str
    fix: str


def encode_error(error: RanklessError) -> bytes:
    """Return an error as JSON."""
    carried = CarriedError(
        about_table=isinstance(error, TableError),
        expected=str(error.expected),
        found=str(error.found),
        fix=error.fix,
    )
    return encode_json(carried)


def decode_error(payload: memoryview, server: str) -> RanklessError:
    """Return the error that the server of this name has sent. What happened on the server is in its text."""
    try:
        carried = decode_json(payload, CarriedError)
    except MessageRefusedError as error:
        return ServerError(
            expected=f"an answer of {server}", found=str(error), fix="use one version of Rankless everywhere"
        )
    kind = TableError if carried.about_table else ServerError
    found = carried.found if carried.about_table else f"{carried.found} ({server})"
    return kind(expected=carried.expected, found=found, fix=carried.fix)

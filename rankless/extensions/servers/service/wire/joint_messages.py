"""Messages about several tables: slices of their steps, and requests for their rows.

A message with slices has four frames. The first is JSON: of each table its number, how many rows its slice has, and in
a push the optimizer's settings. Then come the ids, the occurrences (both int64) and the gradients of all tables.

A request for rows, and its answer, have two frames: numbers, and ids or rows of all tables. The numbers are int64: in
the request the number of each table and how many ids it has there, in the answer the step of each table.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rankless.extensions.servers.service.wire.messages import (
    MOST_JOINT_TABLES,
    Frame,
    MessageRefusedError,
    array_of,
    decode_json,
)
from rankless.extensions.servers.tables.row_gradients import RowGradients


class SliceMessage(msgspec.Struct, frozen=True):
    """What a message says of one table.

    Args:
        table: Number of the table on the server.
        rows: Number of ids of the slice.
        settings: In a push the optimizer's settings, as JSON.
    """

    table: int
    rows: int
    settings: str = ""


class JointSlice(NamedTuple):
    """A slice of one table in a message with others."""

    message: SliceMessage
    gradients: RowGradients


class ReceivedSlice(NamedTuple):
    """The frames of one slice in a message that has arrived: its ids, occurrences and gradients."""

    message: SliceMessage
    frames: tuple[memoryview, memoryview, memoryview]


def encode_slices(slices: Sequence[JointSlice]) -> tuple[Frame, ...]:
    """Return the payload of a message."""
    gradients = [np.ascontiguousarray(each.gradients.gradients).reshape(-1).view(np.uint8) for each in slices]
    return (
        msgspec.json.encode([each.message for each in slices]),
        np.concatenate([each.gradients.ids for each in slices]).astype("<i8", copy=False),
        np.concatenate([each.gradients.occurrences for each in slices]).astype("<i8", copy=False),
        np.concatenate(gradients),
    )


def split_slices(payload: Sequence[memoryview], rows: int, row_bytes_of: Callable[[int], int]) -> list[ReceivedSlice]:
    """Return the slices of a message. None of its arrays has been looked at.

    Args:
        payload: The frames of the message.
        rows: The number of rows of all slices that the header says.
        row_bytes_of: Returns the bytes of a gradient of one row of a table.

    Raises:
        MessageRefusedError: The frames do not fit together.
    """
    if len(payload) != 4:
        raise MessageRefusedError("a wrong number of payload frames")
    messages = decode_json(payload[0], list[SliceMessage])
    if not 1 <= len(messages) <= MOST_JOINT_TABLES:
        raise MessageRefusedError("slices of a wrong number of tables")
    if any(each.table < 0 or each.rows < 0 for each in messages) or sum(each.rows for each in messages) != rows:
        raise MessageRefusedError("slices with wrong numbers of tables or rows")
    sizes = [each.rows * row_bytes_of(each.table) for each in messages]
    array_of(payload[1], "<i8", (rows,))
    array_of(payload[2], "<i8", (rows,))
    if payload[3].nbytes != sum(sizes):
        raise MessageRefusedError("an array of the wrong size")
    found, start, first = [], 0, 0
    for message, size in zip(messages, sizes, strict=True):
        own = slice(start * 8, (start + message.rows) * 8)
        found.append(ReceivedSlice(message, (payload[1][own], payload[2][own], payload[3][first : first + size])))
        start += message.rows
        first += size
    return found


def renumber_slices(payload: Sequence[Frame], find_number: Callable[[int], int]) -> Sequence[Frame]:
    """Return the payload of a message with other numbers of tables."""
    messages = msgspec.json.decode(payload[0], type=list[SliceMessage])
    renumbered = [msgspec.structs.replace(each, table=find_number(each.table)) for each in messages]
    return msgspec.json.encode(renumbered), *payload[1:]


class JointPart(NamedTuple):
    """The number of a table on a server, and ids in it."""

    table: int
    ids: NDArray[np.int64]


def encode_joint_pull(parts: Sequence[JointPart]) -> tuple[Frame, Frame]:
    """Return the payload of a request."""
    numbers = np.array([(part.table, len(part.ids)) for part in parts], "<i8")
    return numbers, np.concatenate([part.ids for part in parts])


def decode_joint_pull(frames: Sequence[memoryview], rows: int) -> list[JointPart]:
    """Return the parts of a request with `rows` ids. Raises MessageRefusedError."""
    count = frames[0].nbytes // 16
    if not 1 <= count <= MOST_JOINT_TABLES:
        raise MessageRefusedError("a pull of a wrong number of tables")
    numbers = array_of(frames[0], "<i8", (count, 2)).tolist()
    if any(table < 0 or each < 0 for table, each in numbers) or sum(each for _, each in numbers) != rows:
        raise MessageRefusedError("a pull with wrong numbers of tables or ids")
    ids, parts, start = array_of(frames[1], "<i8", (rows,)), [], 0
    for table, each in numbers:
        parts.append(JointPart(table, ids[start : start + each]))
        start += each
    return parts


def renumber_joint_pull(payload: Sequence[Frame], find_number: Callable[[int], int]) -> Sequence[Frame]:
    """Return the payload of a request with other numbers of tables."""
    numbers = np.array(payload[0])
    numbers[:, 0] = [find_number(table) for table in numbers[:, 0].tolist()]
    return numbers, *payload[1:]


def encode_rows(steps: Sequence[int], rows: Sequence[NDArray[np.floating]]) -> tuple[Frame, Frame]:
    """Return the payload of an answer."""
    joined = np.concatenate([np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in rows])
    return np.array(steps, "<i8"), joined


def split_rows(payload: Sequence[memoryview], sizes: Sequence[int]) -> list[tuple[int, memoryview]]:
    """Return the step and the rows of each table from an answer.

    Args:
        payload: The frames of the answer.
        sizes: The bytes of each table's rows.

    Raises:
        MessageRefusedError: The answer has other sizes.
    """
    if len(payload) != 2 or payload[1].nbytes != sum(sizes):
        raise MessageRefusedError("an answer of the wrong size")
    steps, found, start = array_of(payload[0], "<i8", (len(sizes),)).tolist(), [], 0
    for step, size in zip(steps, sizes, strict=True):
        found.append((step, payload[1][start : start + size]))
        start += size
    return found

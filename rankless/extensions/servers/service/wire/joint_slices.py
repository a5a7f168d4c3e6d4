"""Slices of a step of several tables in one message. It has four frames.

The first is JSON: of each table its number, how many rows its slice has, and in a push the optimizer's settings. Then
come the ids, the occurrences (both int64) and the gradients of all tables.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

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

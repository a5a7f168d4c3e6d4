"""A request for rows of several tables, and its answer. Each has two frames: numbers, and ids or rows of all tables.

The numbers are int64: in the request the number of each table and how many ids it has there, in the answer the step of
each table.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rankless.extensions.servers.service.wire.messages import MOST_JOINT_TABLES, Frame, MessageRefusedError, array_of


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

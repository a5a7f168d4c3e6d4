"""The arrays of requests about tables, as they are checked before anything is done with them."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from rankless.extensions.servers.service.routing import are_ids_of_shards
from rankless.extensions.servers.service.served_tables import OpenTable
from rankless.extensions.servers.service.wire.messages import MOST_MESSAGE_BYTES, MessageRefusedError, array_of
from rankless.extensions.servers.tables.row_gradients import RowGradients

_MOST_OCCURRENCES = 1 << 32
"""Of one id in one slice, so that sums over workers do not overflow."""


def require_sendable(rows: Iterable[tuple[OpenTable, int]]) -> None:
    """Raise MessageRefusedError for more rows of tables than a message may have."""
    if sum(count * row_bytes_of(opened) for opened, count in rows) > MOST_MESSAGE_BYTES:
        raise MessageRefusedError("a pull of too many rows")


def row_bytes_of(opened: OpenTable) -> int:
    """Return the bytes of one row's value, or of its gradient."""
    settings = opened.table.settings
    return settings.dim * np.dtype(settings.dtype).itemsize


def require_own_ids(opened: OpenTable, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ids of a table, which must be of its shards on this server. Raises MessageRefusedError."""
    if not are_ids_of_shards(ids, opened.table.settings.shard_bits, *opened.shards):
        raise MessageRefusedError("ids of another server")
    return ids


def gradients_of(opened: OpenTable, rows: int, frames: Sequence[memoryview]) -> RowGradients:
    """Return gradients from the frames of their ids, occurrences and elements. Raises MessageRefusedError."""
    settings = opened.table.settings
    ids = require_own_ids(opened, array_of(frames[0], "<i8", (rows,)))
    occurrences = array_of(frames[1], "<i8", (rows,))
    gradients = array_of(frames[2], settings.dtype, (rows, settings.dim))
    if rows and not 0 <= int(occurrences.min()) <= int(occurrences.max()) <= _MOST_OCCURRENCES:
        raise MessageRefusedError("occurrences out of range")
    return RowGradients(ids, occurrences, gradients)

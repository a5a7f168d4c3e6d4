"""The memory of a table: its maps of ids, its rows, and the row numbers that are free."""

import math
import os

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rankless.errors import TableError
from rankless.parameter_server.tables.id_map import FIRST_CAPACITY, LEAST_LOAD, IdMap
from rankless.parameter_server.tables.memory import ReservedMemory
from rankless.parameter_server.tables.rows import COUNTERS, USED, Rows
from rankless.parameter_server.tables.settings import ByCount, TableSettings

SLOT_BYTES = 16


class TableMemory:
    """Memory for as many rows as the host could hold; see Note [reserved memory] in `memory`."""

    def __init__(self, settings: TableSettings) -> None:
        """Reserve memory. Raises TableError if the process may not."""
        self._dtype = np.dtype(settings.dtype)
        self._dim = settings.dim
        row_bytes = settings.dim * self._dtype.itemsize + 2 * SLOT_BYTES
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        most_rows = memory_bytes // row_bytes
        if settings.max_rows is not None:
            most_rows = min(most_rows, settings.shard_rows << settings.shard_bits)
        self._most_rows = most_rows
        shards = 1 << settings.shard_bits
        # Ids whose occurrences are counted have slots and no rows. Hashing gives shards about as many ids each.
        most_ids = memory_bytes // SLOT_BYTES if isinstance(settings.admission, ByCount) else most_rows
        capacity = max(2 * FIRST_CAPACITY, 1 << int(2 * most_ids / shards / LEAST_LOAD).bit_length())
        self._slots = _reserve((shards, 2 * capacity, 2), np.int64, sparse=True)
        self._values = _reserve((most_rows, settings.dim), self._dtype, sparse=False)
        self._used_steps = _reserve((most_rows,), np.int64, sparse=False)
        self._free = _reserve((most_rows,), np.int64, sparse=False)
        self._released = np.full(shards, FIRST_CAPACITY, np.int64)
        capacities = np.full(shards, FIRST_CAPACITY, np.int64)
        self.id_map = IdMap(self._slots.array, capacities, np.zeros(shards, np.int64), settings.shard_bits)
        self.rows = Rows(
            values=self._values.array,
            dim=settings.dim,
            used_steps=self._used_steps.array,
            free=self._free.array,
            counters=np.zeros(COUNTERS, np.int64),
            shard_rows=np.zeros(shards, np.int64),
            initial_state=0.0,
        )

    @property
    def used_rows(self) -> int:
        """Number of row numbers that have ever been used. All rows are below it."""
        return int(self.rows.counters[USED])

    @property
    def written_bytes(self) -> int:
        """Bytes of all rows that have ever been used, and of all slots of the maps."""
        row_bytes = self.rows.values.shape[1] * self._dtype.itemsize + self.rows.used_steps.itemsize
        return int(self.used_rows * row_bytes + self.id_map.capacities.sum() * SLOT_BYTES)

    def set_states(self, states: int, initial_state: float) -> None:
        """Give all rows new optimizer states: `states` times as many elements as values, all `initial_state`."""
        width = self._dim * (1 + states)
        if width != self.rows.values.shape[1]:
            values = _reserve((self._most_rows, width), self._dtype, sparse=False)
            values.array[: self.used_rows, : self._dim] = self.rows.values[: self.used_rows, : self._dim]
            self._values = values
        self.rows = self.rows._replace(values=self._values.array, initial_state=initial_state)
        self.rows.values[: self.used_rows, self._dim :] = initial_state

    def release_grown_shards(self) -> None:
        """Give back the memory of slots that shards have outgrown."""
        shard_bytes = self.id_map.slots.shape[1] * SLOT_BYTES
        for shard in np.flatnonzero(self.id_map.capacities > self._released):
            start = int(shard) * shard_bytes
            first, last = int(self._released[shard]), int(self.id_map.capacities[shard])
            self._slots.release(start + first * SLOT_BYTES, start + last * SLOT_BYTES)
        np.copyto(self._released, self.id_map.capacities)

    def reserve_numbers(self) -> NDArray[np.int64]:
        """Return zeros, int64, one for each possible row."""
        return _reserve((self._most_rows,), np.int64, sparse=False).array


def _reserve(shape: tuple[int, ...], dtype: DTypeLike, *, sparse: bool) -> ReservedMemory:
    try:
        return ReservedMemory(shape, dtype, sparse=sparse)
    except OSError as error:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        raise TableError(
            expected=f"to reserve addresses of {size:,} bytes for a table",
            found=str(error),
            fix="raise the limit of address space (ulimit -v), or give the table max_rows",
        ) from None

"""The memory of a table: its maps of ids, its rows, and the row numbers that are free."""

import math
import os
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rankless.errors import TableError
from rankless.extensions.servers.tables.contents import TableState
from rankless.extensions.servers.tables.id_map import FIRST_CAPACITY, LEAST_LOAD, IdMap
from rankless.extensions.servers.tables.memory import ArrayMemory, ReservedMemory
from rankless.extensions.servers.tables.rows import COUNTERS, USED, Rows
from rankless.extensions.servers.tables.settings import ByCount, TableSettings
from rankless.extensions.servers.tables.undo_log import NO_LOG, UndoLog, remember

SLOT_BYTES = 16


class TableMemory:
    """Memory for as many rows as the host could hold; see Note [reserved memory] in `memory`.

    Attributes:
        log: Where the table's changes are noted. New memory notes none until `start_log`: if the transaction that makes
            it is undone, nobody reads it.
    """

    def __init__(self, settings: TableSettings, memory: ArrayMemory, state: TableState | None = None) -> None:
        """Reserve memory, or take that of an earlier process. Raises TableError if the process may not."""
        self._memory = memory
        self._dtype = np.dtype(settings.dtype)
        self._dim = settings.dim
        self._reserved: dict[str, ReservedMemory] = {}
        self._positions = {} if state is None else dict(state.positions)
        self.log: UndoLog = NO_LOG
        self.most_rows, self.most_slots = _sizes_of(settings) if state is None else (state.most_rows, state.most_slots)
        shards = 1 << settings.shard_bits
        self._numbers = self.reserve("numbers", (3 * shards + COUNTERS,), np.int64)
        capacities, occupied, shard_rows = self._numbers[: 3 * shards].reshape(3, shards)
        if state is None:
            capacities[:] = FIRST_CAPACITY
        self._released = np.full(shards, FIRST_CAPACITY, np.int64)
        slots = self.reserve("slots", (shards, self.most_slots, 2), np.int64, sparse=True)
        self.id_map = IdMap(slots, capacities, occupied, settings.shard_bits)
        self.rows = Rows(
            values=self.reserve("values", (self.most_rows, state.width if state else settings.dim), self._dtype),
            dim=settings.dim,
            used_steps=self.reserve("used_steps", (self.most_rows,), np.int64),
            free=self.reserve("free", (self.most_rows,), np.int64),
            counters=self._numbers[3 * shards :],
            shard_rows=shard_rows,
            initial_state=state.initial_state if state else 0.0,
        )

    def start_log(self) -> None:
        """Note changes from now on."""
        self.log = self._memory.log
        self.id_map, self.rows = self.id_map._replace(log=self.log), self.rows._replace(log=self.log)

    def remember_numbers(self) -> None:
        """Note what the table counts, of which a push changes about all."""
        if self.is_logged:
            remember(self.log, self._numbers)

    @property
    def is_logged(self) -> bool:
        """Whether changes are noted, and are final at the end of a transaction only."""
        return len(self.log.words) > 0

    @property
    def positions(self) -> dict[str, int]:
        """Where the arrays are, by their names."""
        return {name: reserved.position for name, reserved in self._reserved.items()}

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
            values = self.reserve("values", (self.most_rows, width), self._dtype)
            values[: self.used_rows, : self._dim] = self.rows.values[: self.used_rows, : self._dim]
            values[: self.used_rows, self._dim :] = initial_state
            self.rows = self.rows._replace(values=values)
        self.rows = self.rows._replace(initial_state=initial_state)

    def release_grown_shards(self) -> None:
        """Give back the memory of slots that shards have outgrown."""
        shard_bytes = self.id_map.slots.shape[1] * SLOT_BYTES
        for shard in np.flatnonzero(self.id_map.capacities > self._released):
            start = int(shard) * shard_bytes
            first, last = int(self._released[shard]), int(self.id_map.capacities[shard])
            self._reserved["slots"].release(start + first * SLOT_BYTES, start + last * SLOT_BYTES)
        np.copyto(self._released, self.id_map.capacities)

    def reserve(self, name: str, shape: tuple[int, ...], dtype: DTypeLike, *, sparse: bool = False) -> NDArray[Any]:
        """Return zeros in place of the array of that name, or the array that an earlier process has left."""
        try:
            reserved = self._memory.reserve(shape, dtype, sparse=sparse, position=self._positions.pop(name, None))
        except OSError as error:
            size = math.prod(shape) * np.dtype(dtype).itemsize
            raise TableError(
                expected=f"to reserve addresses of {size:,} bytes for a table",
                found=str(error),
                fix="raise the limit of address space (ulimit -v), or give the table max_rows",
            ) from None
        self._reserved[name] = reserved
        return reserved.array

    def drop(self, *names: str) -> None:
        """Forget arrays."""
        for name in names:
            self._reserved.pop(name, None)


def _sizes_of(settings: TableSettings) -> tuple[int, int]:
    """Return how many rows the host could hold, and how many slots for a shard."""
    row_bytes = settings.dim * np.dtype(settings.dtype).itemsize + 2 * SLOT_BYTES
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    most_rows = memory_bytes // row_bytes
    if settings.max_rows is not None:
        most_rows = min(most_rows, settings.shard_rows << settings.shard_bits)
    # Ids whose occurrences are counted have slots and no rows. Hashing gives shards about as many ids each.
    most_ids = memory_bytes // SLOT_BYTES if isinstance(settings.admission, ByCount) else most_rows
    shard_ids = most_ids / (1 << settings.shard_bits)
    return most_rows, 2 * max(2 * FIRST_CAPACITY, 1 << int(2 * shard_ids / LEAST_LOAD).bit_length())

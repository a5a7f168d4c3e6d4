"""A table: rows by 64-bit ids, which are made when training first needs them."""

from collections.abc import Callable

import numpy as np

from rankless.errors import TableError
from rankless.extensions.servers.tables.contents import TableContents, TableState, TableStatistics
from rankless.extensions.servers.tables.id_map import FULL, list_entries, pack_occurrences, unpack_occurrences
from rankless.extensions.servers.tables.memory import ArrayMemory, ProcessMemory
from rankless.extensions.servers.tables.momentum import ARRAYS as HISTORY_ARRAYS
from rankless.extensions.servers.tables.optimizers import AdagradSettings, FtrlSettings, OptimizerSettings, SgdSettings
from rankless.extensions.servers.tables.row_optimizers import (
    Floats,
    MomentumRows,
    Numbers,
    RowOptimizer,
    SgdRows,
    make_row_optimizer,
    restore_row_optimizer,
)
from rankless.extensions.servers.tables.rows import (
    BY_COUNT,
    BY_HASH,
    CONSTANT,
    CREATED,
    EVERY_ID,
    EVICTED,
    EXPIRED,
    NORMAL,
    REJECTED,
    UNIFORM,
    RowPolicy,
    admit,
    expire,
    read_rows,
    restore_entries,
)
from rankless.extensions.servers.tables.settings import ByCount, ByHash, Constant, Normal, TableSettings, Uniform
from rankless.extensions.servers.tables.table_memory import TableMemory
from rankless.extensions.servers.tables.updates import add_weight_decay


class Table:
    """Rows by ids. Reading changes nothing: an id without a row has initial values. Steps create and change rows.

    Example:
        >>> table = Table(TableSettings(dim=4))
        >>> ids = np.array([7, -3])
        >>> before = table.pull(ids)
        >>> table.push(ids, np.ones(2, np.int64), np.ones((2, 4), np.float32), SgdSettings(lr=0.1))
        >>> float((before - table.pull(ids)).max())
        0.1...
    """

    def __init__(
        self, settings: TableSettings, memory: ArrayMemory | None = None, state: TableState | None = None
    ) -> None:
        """Make an empty table, or continue with one.

        Args:
            settings: The table's settings.
            memory: Where its arrays are. None: in memory of this process.
            state: What an earlier process has left in the memory. None: an empty table.

        Raises:
            TableError: The table's memory cannot be reserved.
        """
        self.settings = settings
        self.step = 0
        self._policy = _policy_of(settings)
        self._optimizer: RowOptimizer | None = None
        self._arrays = ProcessMemory() if memory is None else memory
        if state is not None:
            self.load(state)
            return
        self._memory = TableMemory(settings, self._arrays)
        self._memory.start_log()

    def __reduce__(self) -> tuple[Callable[..., "Table"], tuple[TableSettings, TableContents]]:
        return _rebuild, (self.settings, self.contents())

    def pull(self, ids: Numbers) -> Floats:
        """Return the values of ids.

        Args:
            ids: Any ids, also repeated ones, int64, of shape (n,).

        Returns:
            Values of shape (n, dim), in the table's type.
        """
        values = np.empty((len(ids), self.settings.dim), self.settings.dtype)
        read_rows(ids, self._memory.id_map, self._memory.rows, self._policy, values)
        if isinstance(self._optimizer, MomentumRows):
            self._optimizer.catch_up(ids, self._memory.id_map, self._memory.rows, values)
        return values

    def push(self, ids: Numbers, occurrences: Numbers, gradients: Floats, settings: OptimizerSettings) -> None:
        """Make one optimizer step.

        Args:
            ids: The ids that have gradients, each once, int64, of shape (n,).
            occurrences: How often each occurred, int64, of shape (n,). 0: an earlier step has counted it.
            gradients: The sum of each id's gradients, in the table's type, of shape (n, dim).
            settings: The optimizer's settings for this step. A different optimizer than before begins with new states.

        Raises:
            TableError: There is no memory for more rows. Then no row has changed its values.
        """
        assert gradients.shape == (len(ids), self.settings.dim)
        assert gradients.dtype == self.settings.dtype
        self._use_optimizer(settings)
        assert self._optimizer is not None
        self._memory.remember_numbers()
        row_numbers = np.empty(len(ids), np.int64)
        parts = (self._memory.id_map, self._memory.rows, self._policy)
        if admit(ids, occurrences, self.step + 1, parts, row_numbers) == FULL:
            raise self._full_error()
        self.step += 1
        maximizes = not isinstance(settings, FtrlSettings) and settings.maximize
        directed = -gradients if maximizes else gradients
        if isinstance(settings, SgdSettings | AdagradSettings) and settings.weight_decay:
            directed = directed.copy()
            add_weight_decay(self._memory.rows, row_numbers, directed, settings.weight_decay)
        self._optimizer.step(self._memory.rows, row_numbers, directed, settings)
        expire(self.step, parts)
        if not self._memory.is_logged:
            self._memory.release_grown_shards()

    def assign(self, ids: Numbers, values: Floats) -> None:
        """Give ids other values, and those without a row one. It is no step, and optimizer states stay.

        Args:
            ids: Each once, int64, of shape (n,).
            values: Of shape (n, dim), in the table's type.

        Raises:
            TableError: There is no memory for more rows.
        """
        assert not self._memory.is_logged, "a table in the memory of this process"
        row_numbers = np.empty(len(ids), np.int64)
        parts = (self._memory.id_map, self._memory.rows, self._policy)
        if admit(ids, np.ones(len(ids), np.int64), self.step, parts, row_numbers) == FULL:
            raise self._full_error()
        if isinstance(self._optimizer, MomentumRows):
            self._memory.rows.values[row_numbers] = self._caught_up_rows(ids, row_numbers)
            self._optimizer.mark_caught_up(row_numbers)
        self._memory.rows.values[row_numbers, : self.settings.dim] = values
        self._memory.release_grown_shards()

    def reset_states(self) -> None:
        """Forget the optimizer: the next step begins as the first one of its optimizer. Values stay."""
        if self._optimizer is not None:
            ids, entries = self._list_entries()
            held = entries > 0
            row_numbers = entries[held] - 1
            values = self._caught_up_rows(ids[held], row_numbers)[:, : self.settings.dim]
            self._memory.set_states(0, 0.0)
            if isinstance(self._optimizer, MomentumRows):
                self._memory.rows.values[row_numbers] = values
            self._memory.drop(*HISTORY_ARRAYS)
            self._optimizer = None

    def contents(self) -> TableContents:
        """Return a copy of everything that the table holds."""
        ids, entries = self._list_entries()
        order = np.argsort(ids)
        ids, entries = ids[order], entries[order]
        held = entries > 0
        row_numbers = entries[held] - 1
        occurrences, steps = unpack_occurrences(entries[~held])
        return TableContents(
            step=self.step,
            optimizer="" if self._optimizer is None else self._optimizer.name,
            optimizer_steps=0 if self._optimizer is None else self._optimizer.steps,
            initial_state=self._memory.rows.initial_state,
            ids=ids[held],
            rows=self._caught_up_rows(ids[held], row_numbers),
            used_steps=self._memory.rows.used_steps[row_numbers],
            waiting_ids=ids[~held],
            waiting_occurrences=occurrences,
            waiting_steps=steps,
        )

    def restore(self, contents: TableContents) -> None:
        """Take contents, also of a table on another number of servers, instead of what this table holds.

        Raises:
            TableError: The contents are of another number of elements or optimizer than this table can hold.
        """
        memory = TableMemory(self.settings, self._arrays)
        optimizer = restore_row_optimizer(contents, memory)
        states = 0 if optimizer is None else optimizer.states
        expected = self.settings.dim * (1 + states)
        if contents.rows.shape != (len(contents.ids), expected):
            raise TableError(
                expected=f"rows of {expected} elements: {self.settings.dim} values, {states} states of as many",
                found=contents.rows.shape,
                fix="restore the table with the dim that it was stored with",
            )
        memory.set_states(states, contents.initial_state)
        entries = np.arange(1, len(contents.ids) + 1, dtype=np.int64)
        waiting = pack_occurrences(contents.waiting_occurrences, contents.waiting_steps)
        for ids, ids_entries in ((contents.ids, entries), (contents.waiting_ids, waiting)):
            if restore_entries(ids, ids_entries, memory.id_map, memory.rows) == FULL:
                raise self._full_error()
        memory.rows.values[: len(entries)] = contents.rows
        memory.rows.used_steps[: len(entries)] = contents.used_steps
        if isinstance(optimizer, MomentumRows):
            optimizer.mark_caught_up(entries - 1)
        memory.start_log()
        self._memory, self._optimizer, self.step = memory, optimizer, contents.step

    def state(self) -> TableState:
        """Return what another process needs to continue with the same memory."""
        history = self._optimizer.history if isinstance(self._optimizer, MomentumRows) else None
        return TableState(
            step=self.step,
            optimizer="" if self._optimizer is None else self._optimizer.name,
            optimizer_steps=0 if self._optimizer is None else self._optimizer.steps,
            initial_state=self._memory.rows.initial_state,
            width=self._memory.rows.values.shape[1],
            most_rows=self._memory.most_rows,
            most_slots=self._memory.most_slots,
            history_steps=0 if history is None else history.steps,
            history_first_moving=0 if history is None else history.first_moving,
            history_length=0 if history is None else history.length,
            positions=self._memory.positions,
        )

    def load(self, state: TableState) -> None:
        """Go on with what another process, or an undone transaction, has left in the memory."""
        self._memory = TableMemory(self.settings, self._arrays, state)
        self._memory.start_log()
        self._optimizer = restore_row_optimizer(state, self._memory)
        self.step = state.step

    def release_memory(self) -> None:
        """Give back memory that the table has outgrown. A table whose memory has a log needs it after a commit only."""
        self._memory.release_grown_shards()

    def statistics(self) -> TableStatistics:
        """Return the table's numbers."""
        rows = self._memory.rows
        count = int(rows.shard_rows.sum())
        return TableStatistics(
            rows=count,
            waiting=int(self._memory.id_map.occupied.sum()) - count,
            created=int(rows.counters[CREATED]),
            expired=int(rows.counters[EXPIRED]),
            evicted=int(rows.counters[EVICTED]),
            rejected=int(rows.counters[REJECTED]),
            memory_bytes=self._memory.written_bytes,
            largest_shard_rows=int(rows.shard_rows.max()),
        )

    def _use_optimizer(self, settings: OptimizerSettings) -> None:
        if self._optimizer is not None and self._optimizer.accepts(settings):
            return
        continues = isinstance(self._optimizer, SgdRows) and isinstance(settings, SgdSettings)
        if not continues:
            self.reset_states()
        self._optimizer = make_row_optimizer(settings, self._memory)
        self._memory.set_states(self._optimizer.states, self._optimizer.initial_state)

    def _list_entries(self) -> tuple[Numbers, Numbers]:
        ids, entries = np.empty((2, int(self._memory.id_map.occupied.sum())), np.int64)
        list_entries(self._memory.id_map, ids, entries)
        return ids, entries

    def _caught_up_rows(self, ids: Numbers, row_numbers: Numbers) -> Floats:
        rows = self._memory.rows
        copies = rows.values[row_numbers]
        if isinstance(self._optimizer, MomentumRows):
            self._optimizer.catch_up(ids, self._memory.id_map, rows, copies)
        return copies

    def _full_error(self) -> TableError:
        return TableError(
            expected="memory for the rows and ids of a table",
            found=f"none left, with {self.statistics().rows:,} rows and {self.statistics().waiting:,} ids without one",
            fix="give the table max_rows, expire_after_steps or an admission; or add servers",
        )


def _rebuild(settings: TableSettings, contents: TableContents) -> Table:
    table = Table(settings)
    table.restore(contents)
    return table


def _policy_of(settings: TableSettings) -> RowPolicy:
    match settings.initial:
        case Constant(value=value):
            initial = (CONSTANT, value, 0.0)
        case Uniform(low=low, high=high):
            initial = (UNIFORM, low, high)
        case Normal(mean=mean, std=std):
            initial = (NORMAL, mean, std)
    match settings.admission:
        case None:
            admission = (EVERY_ID, 0.0)
        case ByCount(occurrences=occurrences):
            admission = (BY_COUNT, float(occurrences))
        case ByHash(fraction=fraction):
            admission = (BY_HASH, float(fraction))
    return RowPolicy(
        np.uint64(settings.seed), *initial, *admission, settings.shard_rows, settings.expire_after_steps or 0
    )

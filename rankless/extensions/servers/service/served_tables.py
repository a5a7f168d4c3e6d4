"""The tables of one server, by name, and the steps of committed transactions on them.

The arrays of a request are checked before anything is done with them (`require_own_ids`, `gradients_of`).
"""

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rankless.errors import TableError
from rankless.extensions.servers.service.routing import are_ids_of_shards, first_shard
from rankless.extensions.servers.service.steps.worker_changes import WorkerChange
from rankless.extensions.servers.service.wire.messages import MOST_MESSAGE_BYTES, MessageRefusedError, array_of
from rankless.extensions.servers.service.wire.setting_formats import decode_optimizer, decode_table_settings
from rankless.extensions.servers.tables.contents import TableContents
from rankless.extensions.servers.tables.durable_tables import DurableTables
from rankless.extensions.servers.tables.row_gradients import RowGradients, sum_gradients
from rankless.extensions.servers.tables.table import Table

MOST_TABLES = 4096
MOST_NAME_LENGTH = 1024


class OpenTable(NamedTuple):
    """A table, the JSON of its settings, the worker that opened it first, and its shards on this server.

    The worker is None if an earlier process of this server has made the table.
    """

    name: str
    table: Table
    settings: bytes
    worker: int | None
    shards: tuple[int, int]


class KeptTransactions(msgspec.Struct, frozen=True):
    """What a later process of a server must know about transactions, beside the number of the last one.

    Args:
        left: The workers that have left.
        lost: The workers that are lost, and the last transaction in which each takes part.
        round: The number of the workers' last round.
        committed: The last transaction of each worker that has been committed, where each has its own. Empty: none.
        resets: How often the optimizer of a table has been reset, by the table's number.
    """

    left: list[int] = []
    lost: dict[int, int] = {}
    round: int = 0
    committed: list[int] = []
    resets: dict[int, int] = {}


class ServerTables:
    """The tables of one server."""

    def __init__(self, server_index: int, server_count: int, durable: DurableTables | None = None) -> None:
        """Begin without tables, or with those that an earlier process of this server has left."""
        self._server_index, self._server_count = server_index, server_count
        self._durable = durable
        note = "" if durable is None else durable.note
        self._kept = msgspec.json.decode(note, type=KeptTransactions) if note else KeptTransactions()
        self.tables: list[OpenTable] = []
        if durable is not None:
            for name, table in durable.tables.items():
                self._add(name, table, durable.settings[name], None)

    @property
    def last_transaction(self) -> int:
        """The number of the last transaction that an earlier process of this server has committed."""
        return 0 if self._durable is None else self._durable.committed

    @property
    def kept(self) -> KeptTransactions:
        """What an earlier process of this server has kept of transactions."""
        return self._kept

    def keep_left(self, left: Collection[int]) -> None:
        """Keep which workers have left for a later process of this server."""
        if sorted(left) != self._kept.left:
            with self._transaction(None):
                self._keep(msgspec.structs.replace(self._kept, left=sorted(left)))

    def keep_lost(self, lost: Mapping[int, int], round_number: int) -> None:
        """Keep which workers are lost for a later process of this server."""
        kept = msgspec.structs.replace(self._kept, lost=dict(sorted(lost.items())), round=round_number)
        if kept != self._kept:
            with self._transaction(None):
                self._keep(kept)

    def open(self, name: str, settings: bytes, worker: int) -> int:
        """Return the number of a table, which is made if it does not exist.

        Raises:
            TableError: Another worker has opened it with other settings, or there is no memory for it.
        """
        for number, opened in enumerate(self.tables):
            if opened.name == name:
                if opened.settings != settings:
                    raise TableError(
                        expected=f"the table {name!r} with the settings of {_opener(opened)}: {opened.table.settings}",
                        found=f"worker {worker} opens it with {decode_table_settings(settings)}",
                        fix="open a table with the same settings on all workers",
                    )
                return number
        if len(self.tables) == MOST_TABLES or len(name) > MOST_NAME_LENGTH:
            raise TableError(
                expected=f"at most {MOST_TABLES} tables with names of at most {MOST_NAME_LENGTH} characters",
                found=f"{len(self.tables) + 1} tables, and a name of {len(name)} characters",
                fix="use fewer tables or shorter names",
            )
        self._add(name, self._make_table(name, settings), settings, worker)
        return len(self.tables) - 1

    def find(self, number: int) -> OpenTable:
        """Return the table with a number. Raises MessageRefusedError if there is none."""
        if number >= len(self.tables):
            raise MessageRefusedError("an unknown table")
        return self.tables[number]

    def apply(self, changes: Sequence[Sequence[WorkerChange]], number: int, committed: Sequence[int] = ()) -> None:
        """Apply a transaction.

        Args:
            changes: The changes of each worker that takes part, which are the same but for their slices.
            number: The transaction's number.
            committed: The last transaction of each worker, with this one, where each has its own.
        """
        resets = dict(self._kept.resets)
        with self._transaction(number):
            for parts in zip(*changes, strict=True):
                table = self.tables[parts[0].table].table
                slices = [part.gradient_slice for part in parts if part.gradient_slice is not None]
                if slices:
                    total = sum_gradients(slices)
                    settings = decode_optimizer(parts[0].settings)
                    table.push(total.ids, total.occurrences, total.gradients, settings)
                elif not committed:  # all workers ask for it together
                    table.reset_states()
                elif parts[0].reset > resets.get(parts[0].table, 0):  # otherwise another worker has asked before
                    resets[parts[0].table] = parts[0].reset
                    table.reset_states()
            kept = msgspec.structs.replace(self._kept, committed=list(committed), resets=resets)
            if kept != self._kept:
                self._keep(kept)

    def restore(self, opened: OpenTable, contents: TableContents) -> None:
        """Let a table take contents. Raises TableError if it cannot, and then nothing has changed."""
        with self._transaction(None):
            opened.table.restore(contents)

    def _keep(self, kept: KeptTransactions) -> None:
        if self._durable is not None:
            self._durable.set_note(msgspec.json.encode(kept).decode())
        self._kept = kept

    def _transaction(self, number: int | None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._durable is None else self._durable.transaction(number)

    def _add(self, name: str, table: Table, settings: bytes, worker: int | None) -> None:
        first, last = (
            first_shard(index, self._server_count, table.settings.shard_bits)
            for index in (self._server_index, self._server_index + 1)
        )
        self.tables.append(OpenTable(name, table, settings, worker, (first, last)))

    def _make_table(self, name: str, settings: bytes) -> Table:
        decoded = decode_table_settings(settings)
        try:
            return Table(decoded) if self._durable is None else self._durable.open(name, settings)
        except (MemoryError, OverflowError, ValueError, OSError) as error:
            raise TableError(
                expected="settings of a table that fits this host", found=f"{decoded}: {error}", fix="use a smaller dim"
            ) from None


def _opener(opened: OpenTable) -> str:
    return "an earlier process of this server" if opened.worker is None else f"worker {opened.worker}"


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

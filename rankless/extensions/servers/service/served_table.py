"""A table that servers hold, as one worker uses it."""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from rankless.errors import ServerError
from rankless.extensions.servers.service.contents_transfer import (
    PART_BYTES,
    ROWS,
    WAITING,
    ContentsMetadata,
    ContentsSnapshot,
    IncomingContents,
    join_contents,
    split_contents,
)
from rankless.extensions.servers.service.routing import RoutedIds, route_ids, scatter_rows, servers_of_shards
from rankless.extensions.servers.service.server_connection import ServerAnswer, TransferLostError
from rankless.extensions.servers.service.server_requests import ServerRequests
from rankless.extensions.servers.service.table_pulls import (
    PULL_BYTES,
    EarlyPulls,
    EarlyServedPull,
    PendingPull,
    TablePull,
    pull_together,
)
from rankless.extensions.servers.service.wire.messages import Kind, LostChangeMessage, MessageHeader
from rankless.extensions.servers.service.wire.prepared_pushes import PreparedPush
from rankless.extensions.servers.service.wire.setting_formats import encode_optimizer
from rankless.extensions.servers.service.worker_transaction import (
    TableSlice,
    WorkerTransaction,
    send_slice,
    send_slices,
)
from rankless.extensions.servers.tables.contents import TableContents, TableStatistics
from rankless.extensions.servers.tables.optimizers import OptimizerSettings
from rankless.extensions.servers.tables.row_gradients import RowGradients
from rankless.extensions.servers.tables.settings import TableSettings

Result = TypeVar("Result")


class OpenedTable(NamedTuple):
    """The number that each server has for a table, and the steps that there have been."""

    numbers: Sequence[int]
    step: int


class ServedTable:
    """Rows by ids, on the servers of a run. The methods are those of `tables.table.Table`.

    A push is this worker's slice of a step. The step is made when all workers have committed it. A pull sees all steps
    that this worker has committed, and waits for the other workers' part of them.
    """

    def __init__(
        self,
        requests: ServerRequests,
        transaction: WorkerTransaction,
        settings: TableSettings,
        opened: OpenedTable,
        early: EarlyPulls,
    ) -> None:
        """Take a table that all servers have opened."""
        self.settings = settings
        self.requests = requests
        """The connections to the servers."""
        self.transaction = transaction
        """The changes of this worker, to all tables, since its last commit."""
        self._early = early
        self._numbers, self._step = opened
        self._servers = servers_of_shards(len(self._numbers), settings.shard_bits)
        self._resets = 0
        self._pending = (0, 0)
        """The transaction of the last push, and the number of pushes to this table in it."""

    @property
    def step(self) -> int:
        """Number of steps so far, with this worker's own pushes that are not committed yet."""
        return self._step

    def pull(self, ids: NDArray[np.int64]) -> NDArray[np.floating]:
        """Return the values of ids.

        Args:
            ids: Any ids, also repeated ones, int64, of shape (n,).

        Returns:
            Values of shape (n, dim), in the table's type.

        Raises:
            TableError: A step could not be made, on all workers.
            ServerError: A server has died.
        """
        return pull_together([self], [ids])[0]

    def send_pull(self, ids: NDArray[np.int64]) -> PendingPull:
        """Ask for the values of ids, within an exchange."""
        settings = self.settings
        routed = self.route(ids)
        row_bytes = settings.dim * np.dtype(settings.dtype).itemsize
        most = max(1, PULL_BYTES // row_bytes)
        requests, ranges = [], []
        for server, (start, stop) in enumerate(_ranges(routed)):
            for first in range(start, stop, most):
                last = min(first + most, stop)
                header = self._header(Kind.PULL, server, rows=last - first)._replace(flags=self.transaction.pull_flags)
                requests.append(self.requests.send(server, header, (routed.ids[first:last],)))
                ranges.append((first, last))
        return PendingPull(routed, requests, ranges)

    def request_early(self, ids: NDArray[np.int64]) -> EarlyServedPull:
        """Ask for the values of ids with the client's next early request, without waiting; see Note [early rows].

        Args:
            ids: Any ids, int64, of shape (n,). They must not change.
        """
        return self._early.add(TablePull(self, ids))

    def number_on(self, server: int) -> int:
        """Return the number that a server has for the table."""
        return self._numbers[server]

    def take_pull(self, pending: PendingPull, answers: Sequence[ServerAnswer]) -> NDArray[np.floating]:
        """Return the values that servers have answered."""
        settings, routed = self.settings, pending.routed
        if answers:  # another worker may have restored the table
            self._step = answers[0].header.start + self._pending_pushes()
        if len(self._numbers) == len(answers) == 1:  # without a copy: nobody else has these bytes
            return _array(answers[0].payload[0], settings.dtype).reshape(len(routed.ids), settings.dim)
        values = np.empty((len(routed.ids), settings.dim), settings.dtype)
        for answer, (first, last) in zip(answers, pending.ranges, strict=True):
            rows = _array(answer.payload[0], settings.dtype).reshape(last - first, settings.dim)
            if len(self._numbers) == 1:
                values[first:last] = rows
            else:
                scatter_rows(rows, routed.places[first:last], values)
        return values

    def push(
        self,
        ids: NDArray[np.int64],
        occurrences: NDArray[np.int64],
        gradients: NDArray[np.floating],
        settings: OptimizerSettings,
    ) -> None:
        """Add this worker's slice of a step to its transaction. Every worker pushes once, also without ids.

        Args:
            ids: The ids that have gradients, int64, of shape (n,). n may be 0.
            occurrences: How often each occurred in this worker's slice, int64, of shape (n,).
            gradients: The sum of each id's gradients, in the table's type, of shape (n, dim).
            settings: The optimizer's settings for this step, the same on all workers.

        Raises:
            TableError: Another worker has pushed something else, or the slice is too large.
            ServerError: A server has died.
        """
        push_together([TablePush(self, ids, occurrences, gradients, settings)])

    @property
    def committed_by_all(self) -> int:
        """The last transaction that all servers are known to have made."""
        return min(connection.committed for connection in self.requests.connections)

    @property
    def next_change(self) -> tuple[int, int]:
        """The transaction of the next push, and its number among this worker's changes in it, from 0 on."""
        return self.transaction.committed + 1, self.transaction.changes

    def push_for_lost(self, worker: int, change: tuple[int, int], gradients: RowGradients) -> None:
        """Let the servers have what a lost worker would have pushed; see Note [parts of lost workers].

        Args:
            worker: The lost worker.
            change: The transaction and the number of the push, as `next_change` had them.
            gradients: The lost worker's slice.
        """
        part = TableSlice(self, gradients, msgspec.json.encode(LostChangeMessage(worker, change[1])))
        part.require_sendable()
        header = MessageHeader(Kind.PUSH_FOR_LOST, transaction=change[0])
        with self.requests.exchange():
            self.requests.answers(send_slice(self.requests, header, part))

    def push_prepared(self, settings: OptimizerSettings, factor: float) -> None:
        """Add this worker's slice, which all servers have, to its transaction. Nothing is sent before `commit`.

        Args:
            settings: The optimizer's settings for this step, the same on all workers.
            factor: By what the script has multiplied the gradients since they were prepared.
        """
        self.transaction.prepared.append(PreparedPush(self._numbers, encode_optimizer(settings), factor))
        self.note_push()

    def note_push(self) -> None:
        """Count a push that servers have noted."""
        self.transaction.changes += 1
        self._pending = (self.transaction.committed + 1, self._pending_pushes() + 1)
        self._step += 1

    def reset_states(self) -> None:
        """Forget the optimizer, as part of the transaction. All workers ask for it, and it happens once."""
        self._resets += 1
        with self.requests.exchange():
            self.transaction.send_all(self.requests)
            self._ask_all(Kind.RESET, transaction=self.transaction.committed + 1, start=self._resets)
        self.transaction.changes += 1

    def contents(self) -> TableContents:
        """Return a copy of everything that the servers hold after this worker's last commit, in the order of ids."""
        return join_contents(self.requests.read(lambda: begin_anew_if_lost(self._read_all)))

    def _read_all(self) -> list[TableContents]:
        answers = self._ask_all(Kind.CONTENTS)
        metadata = [msgspec.json.decode(answer.payload[0], type=ContentsMetadata) for answer in answers]
        states = {(each.step, each.optimizer, each.optimizer_steps, each.initial_state) for each in metadata}
        if len(states) > 1:
            raise ServerError(
                expected="all servers to have made the same steps",
                found=f"steps and optimizers {sorted(states)}",
                fix="restore the table from a checkpoint",
            )
        return [self._read(server, each) for server, each in enumerate(metadata)]

    def restore(self, contents: TableContents) -> None:
        """Take contents, also of a table on another number of servers, instead of what the servers hold.

        One worker can restore for all. If several do, all must take the same contents. It happens at once, not with the
        transaction: let the workers meet before it, and after it, so that none reads or pushes meanwhile.

        Raises:
            TableError: The contents are of another number of elements or optimizer than this table can hold.
        """
        split = split_contents(contents, self.settings, len(self._numbers))
        self.requests.read(lambda: self._ask_all(Kind.STATISTICS))  # no lost worker's step is awaited from here on
        with self.requests.exchange():
            begin_anew_if_lost(lambda: self._write_all(split))
        self._step = contents.step + self._pending_pushes()

    def _write_all(self, split: Sequence[TableContents]) -> None:
        for server, part in enumerate(split):
            self._write(server, ContentsSnapshot(part))
        self._ask_all(Kind.RESTORE_END)

    def statistics(self) -> TableStatistics:
        """Return the numbers of all servers together."""
        answers = self.requests.read(lambda: self._ask_all(Kind.STATISTICS))
        parts = [msgspec.json.decode(answer.payload[0], type=TableStatistics) for answer in answers]
        sums = {
            name: sum(getattr(part, name) for part in parts)
            for name in ("rows", "waiting", "created", "expired", "evicted", "rejected", "memory_bytes")
        }
        return TableStatistics(**sums, largest_shard_rows=max(part.largest_shard_rows for part in parts))

    def _pending_pushes(self) -> int:
        transaction, pushes = self._pending
        return pushes if transaction == self.transaction.committed + 1 else 0

    def route(self, ids: NDArray[np.int64]) -> RoutedIds:
        """Return ids by server."""
        assert ids.dtype == np.int64
        ids = np.ascontiguousarray(ids)
        if len(self._numbers) == 1:
            return RoutedIds(ids, ids, np.array([0, len(ids)]))
        return route_ids(ids, self.settings.shard_bits, self._servers, len(self._numbers))

    def _header(self, kind: Kind, server: int, *, rows: int = 0) -> MessageHeader:
        transaction = self.transaction.committed
        return MessageHeader(kind, table=self._numbers[server], transaction=transaction, rows=rows)

    def _ask_all(self, kind: Kind, **fields: int) -> list[ServerAnswer]:
        headers = [self._header(kind, server)._replace(**fields) for server in range(len(self._numbers))]
        return self.requests.answers([self.requests.send(server, header) for server, header in enumerate(headers)])

    def _read(self, server: int, metadata: ContentsMetadata) -> TableContents:
        """Return the contents of one server."""
        incoming = IncomingContents(metadata, self.settings.dtype)
        for section, start, count in _parts(metadata, self.settings.dtype):
            header = self._header(Kind.CONTENTS_PART, server, rows=count)._replace(flags=section, start=start)
            (answer,) = self.requests.answers([self.requests.send(server, header)])
            incoming.add(section, start, count, answer.payload)
        self.requests.answers([self.requests.send(server, self._header(Kind.CONTENTS_PART, server))])
        return incoming.finish()

    def _write(self, server: int, snapshot: ContentsSnapshot) -> None:
        """Send contents to one server, which takes them when it is asked to."""
        metadata = snapshot.metadata()
        payload = (msgspec.json.encode(metadata),)
        self.requests.answers([self.requests.send(server, self._header(Kind.RESTORE, server), payload)])
        for section, start, count in _parts(metadata, self.settings.dtype):
            header = self._header(Kind.RESTORE_PART, server, rows=count)._replace(flags=section, start=start)
            frames = tuple(np.ascontiguousarray(array) for array in snapshot.part(section, start, count))
            self.requests.answers([self.requests.send(server, header, frames)])


class TablePush(NamedTuple):
    """A worker's slice of a step of one table; see `ServedTable.push`."""

    table: ServedTable
    ids: NDArray[np.int64]
    occurrences: NDArray[np.int64]
    gradients: NDArray[np.floating]
    settings: OptimizerSettings

    def encode(self) -> TableSlice:
        """Return what is sent."""
        gradients = RowGradients(self.ids, self.occurrences, self.gradients)
        return TableSlice(self.table, gradients, encode_optimizer(self.settings))


def push_together(pushes: Sequence[TablePush]) -> None:
    """Make pushes, at least one, of tables of one client. If its transactions defer, they are sent with its end."""
    requests, transaction = pushes[0].table.requests, pushes[0].table.transaction
    slices = [push.encode() for push in pushes]
    for each in slices:
        each.require_sendable()
    if transaction.defers:
        transaction.waiting += slices
    else:
        with requests.exchange():
            transaction.send_all(requests)
            requests.answers(send_slices(requests, Kind.PUSH, slices, transaction.committed + 1))
    for push in pushes:
        push.table.note_push()


def begin_anew_if_lost(transfer: Callable[[], Result]) -> Result:
    """Return what a transfer of contents returns. If a server starts again in between, it begins anew."""
    while True:
        with contextlib.suppress(TransferLostError):
            return transfer()


def _ranges(routed: RoutedIds) -> list[tuple[int, int]]:
    """Return the range of each server's ids."""
    ends = routed.ends.tolist()
    return list(itertools.pairwise(ends))


def _array(frame: memoryview, dtype: str) -> NDArray[np.floating]:
    array = np.frombuffer(frame, dtype)
    return array if array.flags.aligned else array.copy()


def _parts(metadata: ContentsMetadata, dtype: str) -> list[tuple[int, int, int]]:
    """Return the section, the first row and the number of rows of each part of contents."""
    parts = []
    for section, rows in ((ROWS, metadata.rows), (WAITING, metadata.waiting)):
        most = max(1, PART_BYTES // metadata.row_bytes(section, dtype))
        parts += [(section, start, min(most, rows - start)) for start in range(0, rows, most)]
    return parts

"""When the steps of all workers reach the tables.

Note [transactions]: a worker's pushes since its last commit are its part of one transaction. A server keeps the parts,
and commits a transaction when every worker has said that all servers have its part. So a worker that fails in between
leaves no server with a step that another one lacks. In the modes without common steps each worker has transactions of
its own.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from rankless.errors import TableError
from rankless.parameter_server.servers.messages import MessageRefusedError
from rankless.parameter_server.tables.row_gradients import RowGradients, count_bytes

MOST_AHEAD = 8
"""How many transactions a worker may be ahead of the last one that is committed."""
MOST_HELD_BYTES = 4 << 30
"""Most bytes of one worker's pushes that wait for other workers."""


class WorkerChange(NamedTuple):
    """One push or reset of one worker.

    Args:
        table: Number of the table.
        text: What it does, for people. Equal for all workers.
        settings: Settings of the optimizer as JSON. Empty: reset the optimizer's states.
        gradient_slice: The worker's slice of the gradients. None: reset.
        reset: How many resets of the table the worker has asked for, with this one. 0: it is a push.
    """

    table: int
    text: str
    settings: bytes
    gradient_slice: RowGradients | None
    reset: int = 0


class PendingTransactions(Protocol):
    """The parts of transactions that have arrived, and which ones are committed.

    Attributes:
        ready: The last transaction of each worker that it has said to be complete.
        left: The workers that have left.
    """

    ready: list[int]
    left: set[int]

    def committed_of(self, worker: int) -> int:
        """Return the last transaction of a worker that has been committed."""
        ...

    @property
    def number(self) -> int:
        """How many transactions have been committed."""
        ...

    def list_committed(self) -> list[int]:
        """Return the last one of each worker, where each has its own; nothing otherwise."""
        ...

    def add(self, worker: int, transaction: int, change: WorkerChange) -> None:
        """Keep a worker's next change of its transaction.

        Raises:
            MessageRefusedError: It is not of the worker's next transaction.
            TableError: Another worker's change at the same place differs, or the worker's changes take too much memory.
        """
        ...

    def mark_ready(self, worker: int, transaction: int) -> None:
        """Note that all servers have a worker's part. Raises MessageRefusedError if it is not of its next one."""
        ...

    def leave(self, worker: int) -> None:
        """Wait no more for a worker.

        Raises:
            MessageRefusedError: A part of it is not committed. It must keep that part, because a server that is killed
                loses it.
        """
        ...

    def begin_incarnation(self, worker: int) -> None:
        """Forget the part of a worker's transaction that it has not completed: it begins anew."""
        ...

    def take(self) -> list[list[WorkerChange]] | None:
        """Return the next transaction, as the changes of each worker that takes part, if it is complete.

        Raises:
            TableError: The workers have made different numbers of changes.
        """
        ...


class WorkerParts:
    """The changes of each worker that are not committed, by transaction."""

    def __init__(self, worker_count: int) -> None:
        self._held_bytes = [0] * worker_count
        self._changes: defaultdict[int, dict[int, list[WorkerChange]]] = defaultdict(dict)

    def add(self, worker: int, transaction: int, change: WorkerChange) -> dict[int, list[WorkerChange]]:
        """Keep a worker's next change. Return all workers' changes of that transaction. Raises TableError."""
        size = _size_of(change)
        if self._held_bytes[worker] + size > MOST_HELD_BYTES:
            raise TableError(
                expected=f"pushes of at most {MOST_HELD_BYTES:,} bytes to one server that wait for other workers",
                found=f"{self._held_bytes[worker] + size:,} bytes of worker {worker}",
                fix="make smaller batches, or add servers",
            )
        parts = self._changes[transaction]
        parts.setdefault(worker, []).append(change)
        self._held_bytes[worker] += size
        return parts

    def has(self, worker: int, transaction: int) -> bool:
        """Return whether a worker has made changes in a transaction."""
        return bool(self._changes.get(transaction, {}).get(worker))

    def forget_after(self, worker: int, transaction: int) -> None:
        """Forget a worker's changes in later transactions."""
        for later in [each for each in self._changes if each > transaction]:
            self.take(worker, later)

    def take(self, worker: int, transaction: int) -> list[WorkerChange]:
        """Return a worker's changes in a transaction, which are kept no longer."""
        parts = self._changes[transaction]
        changes = parts.pop(worker, [])
        if not parts:
            del self._changes[transaction]
        self._held_bytes[worker] -= sum(map(_size_of, changes))
        return changes


class CommonTransactions:
    """Transactions of all workers together: an optimizer step for all their batches; see PendingTransactions."""

    def __init__(self, worker_count: int, committed: int = 0, left: Iterable[int] = ()) -> None:
        """Begin, or go on after an earlier process of this server.

        Args:
            worker_count: Number of workers.
            committed: The last transaction that has been committed.
            left: The workers that have left.
        """
        self.ready = [committed] * worker_count
        self.left = set(left)
        self._committed = committed
        self._parts = WorkerParts(worker_count)

    def committed_of(self, worker: int) -> int:  # noqa: ARG002  # the same for all
        """Return the last transaction that has been committed."""
        return self._committed

    @property
    def number(self) -> int:
        """How many transactions have been committed."""
        return self._committed

    def list_committed(self) -> list[int]:
        """Return nothing: workers have no transactions of their own."""
        return []

    def add(self, worker: int, transaction: int, change: WorkerChange) -> None:
        """Keep a worker's next change, and compare it with those of the others."""
        _require_next(transaction, self.ready[worker], "a change")
        parts = self._parts.add(worker, transaction, change)
        place = len(parts[worker]) - 1
        for other, changes in parts.items():
            if len(changes) > place:
                _require_equal(transaction, {worker: change, other: changes[place]})

    def mark_ready(self, worker: int, transaction: int) -> None:
        """Note that all servers have a worker's part."""
        _require_next(transaction, self.ready[worker], "the end")
        self.ready[worker] = transaction

    def leave(self, worker: int) -> None:
        """Wait no more for a worker."""
        _require_nothing_kept(self, self._parts, worker)
        self.left.add(worker)

    def begin_incarnation(self, worker: int) -> None:
        """Forget the part of a worker's transaction that it has not completed."""
        self._parts.forget_after(worker, self.ready[worker])
        if worker in self.left:
            self.left.remove(worker)
            self.ready[worker] = max(self.ready[worker], self._committed)

    def take(self) -> list[list[WorkerChange]] | None:
        """Return the next transaction if all workers have completed it, but for those that have left."""
        transaction = self._committed + 1
        taking_part = [worker for worker, ready in enumerate(self.ready) if ready >= transaction]
        missing = [worker for worker in range(len(self.ready)) if worker not in taking_part]
        if not taking_part or not self.left.issuperset(missing):
            return None
        changes = [self._parts.take(worker, transaction) for worker in taking_part]
        for worker, worker_changes in zip(taking_part, changes, strict=True):
            if len(worker_changes) != len(changes[0]):
                raise TableError(
                    expected=f"the same pushes of all workers in transaction {transaction}",
                    found=f"{len(changes[0])} of worker {taking_part[0]}, {len(worker_changes)} of worker {worker}",
                    fix="push once for each table on every worker in each step, without ids if it has none",
                )
        self._committed = transaction
        return changes


class IndependentTransactions:
    """Transactions of each worker alone: an optimizer step for each of its batches; see PendingTransactions."""

    def __init__(self, worker_count: int, committed: Sequence[int] = (), left: Iterable[int] = ()) -> None:
        """Begin, or go on after an earlier process of this server.

        Args:
            worker_count: Number of workers.
            committed: The last transaction of each worker that has been committed. Default: none has.
            left: The workers that have left.
        """
        self._committed = list(committed) or [0] * worker_count
        self.ready = list(self._committed)
        self.left = set(left)
        self._parts = WorkerParts(worker_count)

    @property
    def slowest(self) -> int:
        """The least number of transactions that a worker has made, of those that have not left."""
        return min((count for worker, count in enumerate(self._committed) if worker not in self.left), default=0)

    def committed_of(self, worker: int) -> int:
        """Return the last transaction of a worker that has been committed."""
        return self._committed[worker]

    @property
    def number(self) -> int:
        """How many transactions have been committed, of all workers."""
        return sum(self._committed)

    def list_committed(self) -> list[int]:
        """Return the last one of each worker."""
        return list(self._committed)

    def add(self, worker: int, transaction: int, change: WorkerChange) -> None:
        """Keep a worker's next change."""
        _require_next(transaction, self.ready[worker], "a change")
        self._parts.add(worker, transaction, change)

    def mark_ready(self, worker: int, transaction: int) -> None:
        """Note that all servers have a worker's transaction."""
        _require_next(transaction, self.ready[worker], "the end")
        self.ready[worker] = transaction

    def leave(self, worker: int) -> None:
        """Wait no more for a worker."""
        _require_nothing_kept(self, self._parts, worker)
        self.left.add(worker)

    def begin_incarnation(self, worker: int) -> None:
        """Forget the transaction that a worker has not completed."""
        self._parts.forget_after(worker, self.ready[worker])
        self.left.discard(worker)

    def take(self) -> list[list[WorkerChange]] | None:
        """Return the next transaction of a worker that has completed one."""
        for worker, committed in enumerate(self._committed):
            if self.ready[worker] > committed:
                self._committed[worker] += 1
                return [self._parts.take(worker, committed + 1)]
        return None


def _require_next(transaction: int, ready: int, what: str) -> None:
    if transaction != ready + 1:
        raise MessageRefusedError(f"{what} of another transaction than the worker's next one")


def _require_nothing_kept(pending: PendingTransactions, parts: WorkerParts, worker: int) -> None:
    ready = pending.ready[worker]
    if ready > pending.committed_of(worker) or parts.has(worker, ready + 1):
        raise MessageRefusedError("a worker that leaves before its part of a transaction is committed")


def _size_of(change: WorkerChange) -> int:
    return 0 if change.gradient_slice is None else count_bytes(change.gradient_slice)


def _require_equal(transaction: int, changes: dict[int, WorkerChange]) -> None:
    texts = {worker: changes[worker].text for worker in sorted(changes)}
    keys = {(change.table, change.settings) for change in changes.values()}
    if len(keys) > 1:
        raise TableError(
            expected=f"the same change of all workers in transaction {transaction}",
            found="; ".join(f"worker {worker}: {text}" for worker, text in texts.items()),
            fix="use the same tables, optimizers and learning rates on all workers, in the same order",
        )

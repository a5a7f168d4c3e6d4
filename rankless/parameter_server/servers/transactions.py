"""When the steps of all workers reach the tables.

Note [transactions]: a worker's pushes since its last commit are its part of one transaction. A server keeps the parts,
and commits a transaction when every worker has said that all servers have its part. So a worker that fails in between
leaves no server with a step that another one lacks.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

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
    """

    table: int
    text: str
    settings: bytes
    gradient_slice: RowGradients | None


class PendingTransactions:
    """The parts of transactions that have arrived, and which ones are committed."""

    def __init__(self, worker_count: int, committed: int = 0, left: Iterable[int] = ()) -> None:
        """Begin, or go on after an earlier process of this server.

        Args:
            worker_count: Number of workers.
            committed: The last transaction that has been committed.
            left: The workers that have left.
        """
        self.committed = committed
        self.ready = [committed] * worker_count
        """The last transaction of each worker that it has said to be complete."""
        self.left = set(left)
        """The workers that have left."""
        self._held_bytes = [0] * worker_count
        self._changes: defaultdict[int, dict[int, list[WorkerChange]]] = defaultdict(dict)

    def add(self, worker: int, transaction: int, change: WorkerChange) -> None:
        """Keep a worker's next change of its transaction.

        Raises:
            MessageRefusedError: It is not of the worker's next transaction.
            TableError: Another worker's change at the same place differs, or the worker's changes take too much memory.
        """
        if transaction != self.ready[worker] + 1:
            raise MessageRefusedError("a change of another transaction than the worker's next one")
        size = 0 if change.gradient_slice is None else count_bytes(change.gradient_slice)
        if self._held_bytes[worker] + size > MOST_HELD_BYTES:
            raise TableError(
                expected=f"pushes of at most {MOST_HELD_BYTES:,} bytes to one server that wait for other workers",
                found=f"{self._held_bytes[worker] + size:,} bytes of worker {worker}",
                fix="make smaller batches, or add servers",
            )
        parts = self._changes[transaction]
        changes = parts.setdefault(worker, [])
        changes.append(change)
        self._held_bytes[worker] += size
        for other, others_changes in parts.items():
            if len(others_changes) >= len(changes):
                _require_equal(transaction, {worker: change, other: others_changes[len(changes) - 1]})

    def mark_ready(self, worker: int, transaction: int) -> None:
        """Note that all servers have a worker's part. Raises MessageRefusedError if it is not of its next one."""
        if transaction != self.ready[worker] + 1:
            raise MessageRefusedError("the end of another transaction than the worker's next one")
        self.ready[worker] = transaction

    def leave(self, worker: int) -> None:
        """Wait no more for a worker.

        Raises:
            MessageRefusedError: A part of it is not committed. It must keep that part, because a server that is killed
                loses it.
        """
        if self.ready[worker] > self.committed or self._changes.get(self.ready[worker] + 1, {}).get(worker):
            raise MessageRefusedError("a worker that leaves before its part of a transaction is committed")
        self.left.add(worker)

    def begin_incarnation(self, worker: int) -> None:
        """Forget the part of a worker's transaction that it has not completed: it begins anew."""
        for transaction, parts in self._changes.items():
            if transaction > self.ready[worker]:
                for change in parts.pop(worker, []):
                    self._held_bytes[worker] -= _size_of(change)
        if worker in self.left:
            self.left.remove(worker)
            self.ready[worker] = max(self.ready[worker], self.committed)

    def take(self) -> list[list[WorkerChange]] | None:
        """Return the next transaction, as the changes of each worker, if all have completed it.

        Raises:
            TableError: The workers have made different numbers of changes.
        """
        transaction = self.committed + 1
        taking_part = [worker for worker, ready in enumerate(self.ready) if ready >= transaction]
        missing = [worker for worker in range(len(self.ready)) if worker not in taking_part]
        if not taking_part or not self.left.issuperset(missing):
            return None
        parts = self._changes.pop(transaction, {})
        changes = [parts.get(worker, []) for worker in taking_part]
        for worker, worker_changes in zip(taking_part, changes, strict=True):
            self._held_bytes[worker] -= sum(map(_size_of, worker_changes))
            if len(worker_changes) != len(changes[0]):
                first, worker_first = taking_part[0], worker
                raise TableError(
                    expected=f"the same pushes of all workers in transaction {transaction}",
                    found=f"{len(changes[0])} of worker {first}, {len(worker_changes)} of worker {worker_first}",
                    fix="push once for each table on every worker in each step, without ids if it has none",
                )
        self.committed = transaction
        return changes


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

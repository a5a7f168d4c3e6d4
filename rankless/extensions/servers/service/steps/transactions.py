"""When the steps of all workers reach the tables.

Note [transactions]: a worker's pushes since its last commit are its part of one transaction. A server keeps the parts,
and commits a transaction when every worker has said that all servers have its part. So a worker that fails in between
leaves no server with a step that another one lacks. In the modes without common steps each worker has transactions of
its own.

Note [lost workers]: the workers that are left say which ones are lost, and the last transaction that counts. Up to it
a lost worker takes part with what it has sent, later it does not. Each worker says it in the order of its own requests,
and what it has sent for later transactions is dropped then. A later round may say that fewer transactions count, if a
worker that knew more was lost meanwhile. None of them is committed, because the others have not made their part.

Note [prepared slices]: a worker that dies after others have stepped would take its part of the step with it. So all
workers send their gradients before any of them steps. The push that follows has the optimizer's settings, and one
factor by which the script has scaled the gradients. A server makes the push of a lost worker from its prepared slice
and the push of another worker: they differ in nothing else.

Note [parts of lost workers]: the gradient of an embedding's weight is whole on all workers, and the script may have
changed it in any way. So nothing is prepared: each worker pushes another part of its rows. The others can make the part
of a lost worker from what they have, and send it. Each worker does so before it tells a server that the other one is
lost, or before it completes that transaction. So a server that makes the step has the part. All workers send the same,
and a server takes the first. None of them is needed if the lost worker has completed the transaction itself.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from rankless.errors import TableError
from rankless.extensions.servers.service.steps.worker_changes import LostWorkerChange, WorkerChange
from rankless.extensions.servers.service.wire.messages import MessageRefusedError
from rankless.extensions.servers.tables.row_gradients import RowGradients, count_bytes, multiply_gradients


class PreparedSlices:
    """The slices of each worker for transactions that are not committed; see Note [prepared slices]."""

    def __init__(self) -> None:
        self._slices: defaultdict[int, dict[tuple[int, int], RowGradients]] = defaultdict(dict)
        """By transaction, then by worker and table."""
        self._of_lost: defaultdict[int, dict[tuple[int, int], RowGradients]] = defaultdict(dict)
        """What others have sent for lost workers: by transaction, then by worker and the number of the change."""

    def add(self, worker: int, transaction: int, table: int, gradients: RowGradients) -> None:
        """Keep a slice, instead of an earlier one whose step the worker has not made."""
        self._slices[transaction][worker, table] = gradients

    def add_for_lost(self, transaction: int, change: LostWorkerChange) -> None:
        """Keep what a lost worker would have pushed, unless another worker has said it already."""
        self._of_lost[transaction].setdefault((change.worker, change.number), change.gradients)

    def take_scaled(self, worker: int, transaction: int, table: int, factor: float) -> RowGradients | None:
        """Return a worker's slice, with its gradients times a factor. None: it has sent none."""
        found = self._slices.get(transaction, {}).get((worker, table))
        return None if found is None else multiply_gradients(found, factor)

    def complete(self, worker: int, transaction: int, changes: Sequence[WorkerChange]) -> list[WorkerChange]:
        """Return the changes of a lost worker, from those of another worker and from its slices.

        Raises TableError if this process has not all of them.
        """
        completed = []
        for number, change in enumerate(changes):
            gradients = change.gradient_slice
            if gradients is not None and change.factor is not None:
                gradients = self.take_scaled(worker, transaction, change.table, change.factor)
            elif gradients is not None:
                gradients = self._of_lost.get(transaction, {}).get((worker, number))
            if change.gradient_slice is not None and gradients is None:
                raise TableError(
                    expected=f"the gradients of worker {worker} for transaction {transaction}",
                    found="that it was lost before they arrived, or together with an earlier process of this server",
                    fix="start the run again from a checkpoint",
                )
            completed.append(change._replace(gradient_slice=gradients))
        return completed

    def forget(self, transaction: int) -> None:
        """Forget the slices of a transaction, which is committed."""
        self._slices.pop(transaction, None)
        for earlier in [each for each in self._of_lost if each <= transaction]:
            del self._of_lost[earlier]

    def forget_after(self, worker: int, transaction: int) -> None:
        """Forget a worker's slices for later transactions: it will make them again."""
        for slices_by_transaction in (self._slices, self._of_lost):
            for later in [each for each in slices_by_transaction if each > transaction]:
                slices = slices_by_transaction[later]
                for key in [key for key in slices if key[0] == worker]:
                    del slices[key]
                if not slices:
                    del slices_by_transaction[later]


MOST_AHEAD = 8
"""How many transactions a worker may be ahead of the last one that is committed."""
MOST_HELD_BYTES = 4 << 30
"""Most bytes of one worker's pushes that wait for other workers."""


class PendingTransactions(Protocol):
    """The parts of transactions that have arrived, and which ones are committed.

    Attributes:
        ready: The last transaction of each worker that it has said to be complete.
        left: The workers that have left.
        lost: The workers that are lost, and the last transaction in which each takes part.
    """

    ready: list[int]
    left: set[int]
    lost: dict[int, int]

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

    def prepare(self, worker: int, transaction: int, table: int, gradients: RowGradients) -> None:
        """Keep a worker's slice of a step that follows; see Note [prepared slices].

        Raises:
            MessageRefusedError: It is not of the worker's next transaction, or there are no common steps.
            TableError: The worker's slices take too much memory.
        """
        ...

    def find_prepared(self, worker: int, transaction: int, table: int, factor: float) -> RowGradients:
        """Return a worker's prepared slice times a factor. Raises MessageRefusedError if there is none."""
        ...

    def add_for_lost(self, worker: int, transaction: int, change: LostWorkerChange) -> None:
        """Keep what a lost worker would have pushed; see Note [parts of lost workers].

        Args:
            worker: The worker that sends it.
            transaction: The transaction. One that is committed needs no part.
            change: Whose change it is, and which.

        Raises:
            MessageRefusedError: It is of another transaction, or of the sender itself.
            TableError: It takes too much memory.
        """
        ...

    def regroup(self, worker: int, lost: Collection[int], transaction: int) -> None:
        """Take a worker's message that others are lost; see Note [lost workers].

        Args:
            worker: The worker that says it.
            lost: All workers that are lost.
            transaction: The last transaction that counts.

        Raises:
            MessageRefusedError: The worker itself is among them, or has completed later transactions.
        """
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
        self.require_memory(worker, change.gradient_slice)
        parts = self._changes[transaction]
        parts.setdefault(worker, []).append(change)
        self._held_bytes[worker] += _size_of(change)
        return parts

    def require_memory(self, worker: int, gradients: RowGradients | None) -> None:
        """Raise TableError if a worker's changes would take too much memory with these gradients."""
        size = self._held_bytes[worker] + (0 if gradients is None else count_bytes(gradients))
        if size > MOST_HELD_BYTES:
            raise TableError(
                expected=f"pushes of at most {MOST_HELD_BYTES:,} bytes to one server that wait for other workers",
                found=f"{size:,} bytes of worker {worker}",
                fix="make smaller batches, or add servers",
            )

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

    def __init__(
        self,
        worker_count: int,
        committed: int = 0,
        left: Iterable[int] = (),
        lost: Mapping[int, int] | None = None,
    ) -> None:
        """Begin, or continue after an earlier process of this server.

        Args:
            worker_count: Number of workers.
            committed: The last transaction that has been committed.
            left: The workers that have left.
            lost: The workers that are lost, and the last transaction in which each takes part. Default: none.
        """
        self.ready = [committed] * worker_count
        self.left = set(left)
        self.lost = dict(lost or {})
        self._committed = committed
        self._parts = WorkerParts(worker_count)
        self._prepared = PreparedSlices()

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
        require_next(transaction, self.ready[worker], "a change")
        parts = self._parts.add(worker, transaction, change)
        place = len(parts[worker]) - 1
        for other, changes in parts.items():
            if len(changes) > place:
                _require_equal(transaction, {worker: change, other: changes[place]})

    def mark_ready(self, worker: int, transaction: int) -> None:
        """Note that all servers have a worker's part."""
        require_next(transaction, self.ready[worker], "the end")
        self.ready[worker] = transaction

    def leave(self, worker: int) -> None:
        """Wait no more for a worker."""
        require_nothing_kept(self, self._parts, worker)
        self.left.add(worker)

    def begin_incarnation(self, worker: int) -> None:
        """Forget the part of a worker's transaction that it has not completed."""
        self._parts.forget_after(worker, self.ready[worker])
        if worker in self.left:
            self.left.remove(worker)
            self.ready[worker] = max(self.ready[worker], self._committed)

    def prepare(self, worker: int, transaction: int, table: int, gradients: RowGradients) -> None:
        """Keep a worker's slice of a step that follows."""
        require_next(transaction, self.ready[worker], "a change")
        self._parts.require_memory(worker, gradients)
        self._prepared.add(worker, transaction, table, gradients)

    def find_prepared(self, worker: int, transaction: int, table: int, factor: float) -> RowGradients:
        """Return a worker's prepared slice times a factor."""
        found = self._prepared.take_scaled(worker, transaction, table, factor)
        if found is None:
            raise MessageRefusedError("a push of gradients that were not prepared")
        return found

    def add_for_lost(self, worker: int, transaction: int, change: LostWorkerChange) -> None:
        """Keep what a lost worker would have pushed, the first time that another worker says it."""
        if not 1 <= transaction <= self._committed + MOST_AHEAD + 1 or change.worker == worker:
            raise MessageRefusedError("a part of no lost worker, or of a transaction that cannot be")
        if transaction > self._committed:
            self._parts.require_memory(worker, change.gradients)
            self._prepared.add_for_lost(transaction, change)

    def regroup(self, worker: int, lost: Collection[int], transaction: int) -> None:
        """Take a worker's message that others are lost; see Note [lost workers]."""
        if worker in lost or self.ready[worker] > transaction:
            raise MessageRefusedError(
                "lost workers that cannot be, or fewer transactions than the worker has completed"
            )
        for each in lost:
            self.lost[each] = min(transaction, self.lost.get(each, transaction))
            self.ready[each] = min(self.ready[each], self.lost[each])
        for each in (worker, *lost):
            self._parts.forget_after(each, transaction)
            self._prepared.forget_after(each, transaction)

    def take(self) -> list[list[WorkerChange]] | None:
        """Return the next transaction if all workers have completed it, but for those that have left or are lost."""
        transaction = self._committed + 1
        taking_part = [worker for worker, ready in enumerate(self.ready) if ready >= transaction]
        waiting_for = set(range(len(self.ready))) - set(taking_part) - self.left - self.lost.keys()
        if waiting_for or not set(taking_part) - self.lost.keys():
            return None
        changes = {worker: self._parts.take(worker, transaction) for worker in taking_part}
        known = next(changes[worker] for worker in taking_part if worker not in self.lost)
        for worker, last in self.lost.items():
            if worker not in changes and last >= transaction:
                self._parts.take(worker, transaction)
                changes[worker] = self._prepared.complete(worker, transaction, known)
        for worker, worker_changes in changes.items():
            if len(worker_changes) != len(known):
                first = next(each for each in changes if changes[each] is known)
                raise TableError(
                    expected=f"the same pushes of all workers in transaction {transaction}",
                    found=f"{len(known)} of worker {first}, {len(worker_changes)} of worker {worker}",
                    fix="push once for each table on every worker in each step, without ids if it has none",
                )
        self._prepared.forget(transaction)
        self._committed = transaction
        return [changes[worker] for worker in sorted(changes)]


def require_next(transaction: int, ready: int, what: str) -> None:
    """Raise MessageRefusedError for a message of another transaction than the one after the last complete one."""
    if transaction != ready + 1:
        raise MessageRefusedError(f"{what} of another transaction than the worker's next one")


def require_nothing_kept(pending: PendingTransactions, parts: WorkerParts, worker: int) -> None:
    """Raise MessageRefusedError if a server keeps a part of a worker that is not committed."""
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

"""When the steps of each worker reach the tables, in the modes without common steps."""

from collections.abc import Collection, Iterable, Sequence

from rankless.extensions.servers.service.steps.transactions import WorkerParts, require_next, require_nothing_kept
from rankless.extensions.servers.service.steps.worker_changes import LostWorkerChange, WorkerChange
from rankless.extensions.servers.service.wire.messages import MessageRefusedError
from rankless.extensions.servers.tables.row_gradients import RowGradients


class IndependentTransactions:
    """Transactions of each worker alone: an optimizer step for each of its batches; see PendingTransactions."""

    def __init__(self, worker_count: int, committed: Sequence[int] = (), left: Iterable[int] = ()) -> None:
        """Begin, or continue after an earlier process of this server.

        Args:
            worker_count: Number of workers.
            committed: The last transaction of each worker that has been committed. Default: none has.
            left: The workers that have left.
        """
        self._committed = list(committed) or [0] * worker_count
        self.ready = list(self._committed)
        self.left = set(left)
        self.lost: dict[int, int] = {}
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
        require_next(transaction, self.ready[worker], "a change")
        self._parts.add(worker, transaction, change)

    def mark_ready(self, worker: int, transaction: int) -> None:
        """Note that all servers have a worker's transaction."""
        require_next(transaction, self.ready[worker], "the end")
        self.ready[worker] = transaction

    def leave(self, worker: int) -> None:
        """Wait no more for a worker."""
        require_nothing_kept(self, self._parts, worker)
        self.left.add(worker)

    def begin_incarnation(self, worker: int) -> None:
        """Forget the transaction that a worker has not completed."""
        self._parts.forget_after(worker, self.ready[worker])
        self.left.discard(worker)

    def prepare(self, worker: int, transaction: int, table: int, gradients: RowGradients) -> None:  # noqa: ARG002
        """Refuse it: no step has parts of several workers."""
        raise MessageRefusedError("gradients for a common step in a mode without one")

    def find_prepared(self, worker: int, transaction: int, table: int, factor: float) -> RowGradients:  # noqa: ARG002
        """Refuse it: nothing is prepared."""
        raise MessageRefusedError("a push of gradients that were not prepared")

    def add_for_lost(self, worker: int, transaction: int, change: LostWorkerChange) -> None:  # noqa: ARG002
        """Refuse it: no step has parts of several workers."""
        raise MessageRefusedError("the part of a lost worker in a mode without common steps")

    def regroup(self, worker: int, lost: Collection[int], transaction: int) -> None:  # noqa: ARG002
        """Refuse it: no worker waits for the step of another one."""
        raise MessageRefusedError("lost workers in a mode without common steps")

    def take(self) -> list[list[WorkerChange]] | None:
        """Return the next transaction of a worker that has completed one."""
        for worker, committed in enumerate(self._committed):
            if self.ready[worker] > committed:
                self._committed[worker] += 1
                return [self._parts.take(worker, committed + 1)]
        return None

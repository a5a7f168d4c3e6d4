"""Gradients that workers have sent before their step, so that the step outlives the worker that computed them.

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
from collections.abc import Sequence

from rankless.errors import TableError
from rankless.extensions.servers.service.steps.worker_changes import LostWorkerChange, WorkerChange
from rankless.extensions.servers.tables.row_gradients import RowGradients, multiply_gradients


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

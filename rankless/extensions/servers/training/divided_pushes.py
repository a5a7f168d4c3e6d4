"""Which worker pushes which rows of a gradient that all workers have whole, also after a worker was lost.

Note [pushes of whole gradients]: each worker pushes another part of a gradient's rows, so that it goes to the servers
once. Those that have begun a step together make it together: if one of them is lost, the others also send what it would
have pushed, because a server may have made the parts of those that were faster. After the last transaction that counts
the workers that are left divide the rows among themselves. A worker that has completed its part keeps the gradients
until all servers have made the step, because another worker may be lost that has not completed its own. See Note [parts
of lost workers] in `service.steps.transactions`.
"""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rankless.extensions.servers.service.served_table import ServedTable
from rankless.extensions.servers.tables.contents import TableContents, TableStatistics
from rankless.extensions.servers.tables.optimizers import OptimizerSettings
from rankless.extensions.servers.tables.row_gradients import RowGradients
from rankless.extensions.servers.tables.settings import TableSettings


class WholePush(NamedTuple):
    """A gradient of which each worker has pushed its part.

    Args:
        table: The rows.
        change: The transaction, and the number of the push in it.
        members: The workers that push parts of it.
        whole: The gradient of all workers.
    """

    table: ServedTable
    change: tuple[int, int]
    members: tuple[int, ...]
    whole: RowGradients

    def part(self, worker: int) -> RowGradients:
        """Return what a worker pushes."""
        place, count, rows = self.members.index(worker), len(self.members), len(self.whole.ids)
        own = slice(rows * place // count, rows * (place + 1) // count)
        return RowGradients(self.whole.ids[own], self.whole.occurrences[own], self.whole.gradients[own])


class PushDivision:
    """Divides whole gradients between workers; see Note [pushes of whole gradients]."""

    def __init__(self, *, worker: int, worker_count: int, keeps: bool) -> None:
        """Divide between all workers with which the run began.

        Args:
            worker: Number of this worker.
            worker_count: Number of workers.
            keeps: Whether to keep the gradients of a step, because a worker may be lost.
        """
        self._worker, self._keeps = worker, keeps
        self._members = tuple(range(worker_count))
        """Those that make the next step together."""
        self._living = self._members
        self._common = 0
        """The last transaction that counted when a worker was lost."""
        self._kept: list[WholePush] = []
        """The pushes of transactions that servers may not have made."""

    def push(self, table: ServedTable, whole: RowGradients, settings: OptimizerSettings) -> None:
        """Push this worker's part of a gradient, and those of lost workers that have begun the step."""
        push = WholePush(table, table.next_change, self._members, whole)
        if self._keeps:
            self._kept = [*(each for each in self._kept if each.change[0] > table.committed_by_all), push]
        self._push_for_lost(push)
        own = push.part(self._worker)
        table.push(own.ids, own.occurrences, own.gradients, settings)

    def regroup(self, lost: Collection[int], *, own_committed: int, committed: int) -> None:
        """Send what lost workers would have pushed, before the servers are told that they are lost.

        Args:
            lost: All workers that are lost.
            own_committed: The last transaction that this worker has completed.
            committed: The last one that counts.
        """
        self._living = tuple(worker for worker in self._living if worker not in lost)
        self._common = committed
        for push in self._kept:
            if push.change[0] <= committed:
                self._push_for_lost(push)
        self.end_step(own_committed)

    def end_step(self, own_committed: int) -> None:
        """Divide the next step between the workers that are left, if the lost ones have not begun it.

        Args:
            own_committed: The last transaction that this worker has completed.
        """
        if own_committed >= self._common:
            self._members = self._living

    def _push_for_lost(self, push: WholePush) -> None:
        for worker in push.members:
            if worker not in self._living:
                push.table.push_for_lost(worker, push.change, push.part(worker))


class DividedStore:
    """The rows of a weight on servers, whose pushes have the gradients of all workers: a `RowStore`."""

    def __init__(self, served: ServedTable, division: PushDivision) -> None:
        """Push to a table on servers as a division says."""
        self.settings: TableSettings = served.settings
        self._served, self._division = served, division

    @property
    def step(self) -> int:
        """How many steps there have been."""
        return self._served.step

    def pull(self, ids: NDArray[np.int64]) -> NDArray[np.floating]:
        """Return the values of ids, of shape (n, dim)."""
        return self._served.pull(ids)

    def push(
        self,
        ids: NDArray[np.int64],
        occurrences: NDArray[np.int64],
        gradients: NDArray[np.floating],
        settings: OptimizerSettings,
    ) -> None:
        """Make one step with the gradients of all workers, which every worker has."""
        self._division.push(self._served, RowGradients(ids, occurrences, gradients), settings)

    def reset_states(self) -> None:
        """Forget the optimizer."""
        self._served.reset_states()

    def contents(self) -> TableContents:
        """Return everything that the servers hold."""
        return self._served.contents()

    def restore(self, contents: TableContents) -> None:
        """Take contents instead of what the servers hold."""
        self._served.restore(contents)

    def statistics(self) -> TableStatistics:
        """Return the numbers of all servers together."""
        return self._served.statistics()

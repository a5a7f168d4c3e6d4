"""A table whose rows a worker trains on its own, and exchanges with servers from time to time.

Note [geo]: a worker has its latest rows, and the base: what it knows of the servers. With W workers it sends
(latest - base) / W of the rows that it has trained since the last exchange, and adds this to the base. The servers add
it to their rows. Then the worker adds to its latest rows what the servers' rows are ahead of the base, and these become
the base. No worker waits. What the servers still lack goes with later exchanges of the same rows, and is dropped when
workers meet. The name and the rule are those of Paddle.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rankless.errors import TableError
from rankless.extensions.servers.service.served_table import ServedTable, TablePush
from rankless.extensions.servers.tables.contents import TableContents, TableStatistics
from rankless.extensions.servers.tables.optimizers import OptimizerSettings, SgdSettings
from rankless.extensions.servers.tables.table import Table

ADD = SgdSettings(lr=1.0, maximize=True)
"""With it, a push adds what it has."""


class GeoTable:
    """One worker's rows of a table on servers; see Note [geo]. It is a `tables.row_store.RowStore`.

    Args:
        served: The table on the servers.
        worker_count: Number of workers.
        is_training: Returns whether rows are read for a training step. Other reads are of the servers' rows.

    Raises:
        TableError: The table's rows come and go by steps, which servers do not see.
    """

    def __init__(self, served: ServedTable, worker_count: int, is_training: Callable[[], bool]) -> None:
        settings = served.settings
        if settings.admission is not None or settings.expire_after_steps is not None:
            raise TableError(
                expected="tables without admission and expiry with --server-mode geo, because servers do not see steps",
                found=f"admission={settings.admission}, expire_after_steps={settings.expire_after_steps}",
                fix="omit them, or use --server-mode async",
            )
        self.settings, self.served = settings, served
        self._worker_count, self._is_training = worker_count, is_training
        own = dataclasses.replace(settings, max_rows=None)
        self._latest, self._base = Table(own), Table(own)
        self._known: set[int] = set()
        """Ids whose rows are here."""
        self._trained: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        """Ids and their occurrences of each step since the last exchange."""
        self._sent: NDArray[np.int64] = np.empty(0, np.int64)

    @property
    def step(self) -> int:
        """Number of steps of this worker."""
        return self._latest.step

    def pull(self, ids: NDArray[np.int64]) -> NDArray[np.floating]:
        """Return the values of ids: this worker's in a training step, and the servers' otherwise."""
        if not self._is_training():
            return self.served.pull(ids)
        self._fetch(ids)
        return self._latest.pull(ids)

    def push(
        self,
        ids: NDArray[np.int64],
        occurrences: NDArray[np.int64],
        gradients: NDArray[np.floating],
        settings: OptimizerSettings,
    ) -> None:
        """Make one step on this worker's rows."""
        self._fetch(ids)
        self._latest.push(ids, occurrences, gradients, settings)
        self._trained.append((ids, occurrences))

    def reset_states(self) -> None:
        """Forget the optimizer."""
        self._latest.reset_states()

    def contents(self) -> TableContents:
        """Return what the servers hold, without optimizer states, which are this worker's."""
        return self.served.contents()

    def restore(self, contents: TableContents) -> None:
        """Let the servers take contents."""
        self.served.restore(contents)
        self.forget()

    def statistics(self) -> TableStatistics:
        """Return the numbers of the servers."""
        return self.served.statistics()

    def make_push(self) -> TablePush:
        """Return this worker's share of what it has trained since the last exchange."""
        ids, places = np.unique(
            np.concatenate([self._sent[:0], *(ids for ids, _ in self._trained)]), return_inverse=True
        )
        occurrences = np.zeros(len(ids), np.int64)
        np.add.at(occurrences, places, np.concatenate([self._sent[:0], *(counts for _, counts in self._trained)]))
        self._trained.clear()
        self._sent = ids
        base = self._base.pull(ids)
        share = (self._latest.pull(ids) - base) / self._worker_count
        share = share.astype(self.settings.dtype, copy=False)
        self._base.assign(ids, base + share)
        return TablePush(self.served, ids, occurrences, share, ADD)

    def take_others(self) -> None:
        """Add to the rows of the last exchange what other workers have trained meanwhile."""
        ids, self._sent = self._sent, self._sent[:0]
        on_servers = self.served.pull(ids)
        self._latest.assign(ids, self._latest.pull(ids) + (on_servers - self._base.pull(ids)))
        self._base.assign(ids, on_servers)

    def forget(self) -> None:
        """Read rows from the servers again. Optimizer states stay."""
        self._known.clear()
        self._trained.clear()
        self._sent = self._sent[:0]

    def _fetch(self, ids: NDArray[np.int64]) -> None:
        """Read rows that are not here from the servers."""
        unknown = np.array(sorted(set(ids.tolist()) - self._known), np.int64)
        if len(unknown):
            rows = self.served.pull(unknown)
            self._latest.assign(unknown, rows)
            self._base.assign(unknown, rows)
            self._known.update(unknown.tolist())

"""The mode `geo`: a worker trains tables and dense parameters on its own, and exchanges them with servers at times.

Note [geo]: a worker has its latest rows, and the base: what it knows of the servers. With W workers it sends
(latest - base) / W of the rows that it has trained since the last exchange, and adds this to the base. The servers add
it to their rows. Then the worker adds to its latest rows what the servers' rows are ahead of the base, and these become
the base. No worker waits. What the servers still lack goes with later exchanges of the same rows, and is dropped when
workers meet. The name and the rule are those of Paddle.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from rankless.errors import TableError
from rankless.extensions.servers.service.client import ServerClient
from rankless.extensions.servers.service.served_table import ServedTable, TablePush, push_together
from rankless.extensions.servers.tables.contents import TableContents, TableStatistics
from rankless.extensions.servers.tables.optimizers import OptimizerSettings, SgdSettings
from rankless.extensions.servers.tables.table import Table
from rankless.extensions.servers.training.parameter_rows import Floats, ParameterRows, pull_rows
from rankless.extensions.servers.training.parameter_states import ParameterStates
from rankless.extensions.servers.training.replicated_table import Gather


class GeoParameter:
    """One parameter of this worker, and what the servers are known to have of it."""

    def __init__(self, client: ServerClient, name: str, parameter: Tensor) -> None:
        self.parameter = parameter
        self.rows = ParameterRows(client, name, parameter)
        self._base: Floats = np.empty(0)

    def make_push(self, worker_count: int) -> TablePush:
        """Return this worker's share of what it has trained since the last exchange."""
        share = (self.rows.cut(self.parameter) - self._base) / worker_count
        self._base = self._base + share
        return self.rows.make_push(share, ADD)

    def take_others(self, on_servers: Floats) -> None:
        """Add what other workers have trained meanwhile."""
        self.rows.write(self.parameter, self.rows.cut(self.parameter) + (on_servers - self._base))
        self._base = on_servers.copy()

    def take(self, on_servers: Floats) -> None:
        """Take the values of the servers."""
        self.rows.write(self.parameter, on_servers)
        self._base = on_servers.copy()


class GeoParameters:
    """The parameters of a worker's jobs that optimizers step. It is a `own_steps.SharedParameters`."""

    def __init__(self, client: ServerClient, gather: Gather, *, worker: int, worker_count: int) -> None:
        self._client, self._gather = client, gather
        self._worker, self._worker_count = worker, worker_count
        self._parameters: dict[int, GeoParameter] = {}

    def share(
        self,
        optimizers: Iterable[Optimizer],
        table_weights: Iterable[Tensor],
        sparse_weights: Iterable[Tensor],  # noqa: ARG002  # a worker steps them itself
        *,
        is_current: bool,  # noqa: ARG002  # changes by the script are training, too
        compares: bool,  # noqa: ARG002
    ) -> None:
        """Give the servers parameters that they do not have. Collective. Raises TableError if values differ."""
        left_out = {id(each) for each in table_weights}
        groups = (group for optimizer in optimizers for group in optimizer.param_groups)
        given = {id(each): each for group in groups for each in group["params"] if each.numel()}
        added = [self._open(each) for key, each in given.items() if key not in left_out | self._parameters.keys()]
        if not added:
            return
        everyone = self._gather(b"".join(each.rows.cut(each.parameter).tobytes() for each in added))
        other = next((worker for worker, each in enumerate(everyone) if each != everyone[0]), None)
        if other is not None:
            raise TableError(
                expected="parameters that are equal on all workers before their first step",
                found=f"other values on worker {other} than on worker 0",
                fix="make the model with the same seed on all workers",
            )
        if self._worker == 0:
            for each in added:
                each.rows.restore(ParameterStates("", 0, ()))
        self._gather(b"")  # nobody reads before the values are there
        for each in added:
            each.take(each.rows.cut(each.parameter))

    def pull(self, parameters: Iterable[Tensor]) -> None:
        """Do nothing: a worker trains its own parameters."""

    def pull_states(self) -> None:
        """Take the servers' values of all parameters. Optimizer states are each worker's own."""
        everything = list(self._parameters.values())
        for each, rows in zip(everything, pull_rows([each.rows for each in everything]), strict=True):
            each.take(rows)

    def find_changed(self, parameters: Iterable[Tensor]) -> None:  # noqa: ARG002
        """Return None: changes by a job are training, too."""
        return

    def step_on_servers(self, optimizer: Optimizer) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002
        """Return an empty context: a worker steps its own parameters."""
        return contextlib.nullcontext()

    def make_pushes(self) -> list[TablePush]:
        """Return this worker's shares of what it has trained since the last exchange."""
        return [each.make_push(self._worker_count) for each in self._parameters.values()]

    def take_others(self) -> None:
        """Add what other workers have trained meanwhile."""
        everything = list(self._parameters.values())
        for each, rows in zip(everything, pull_rows([each.rows for each in everything]), strict=True):
            each.take_others(rows)

    def _open(self, parameter: Tensor) -> GeoParameter:
        opened = GeoParameter(self._client, f"parameter {len(self._parameters)}", parameter)
        self._parameters[id(parameter)] = opened
        return opened


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


class GeoExchange:
    """What one worker trains on its own.

    Args:
        client: The connections to the servers.
        gather: Exchanges bytes with the other workers.
        worker: Number of this worker.
        worker_count: Number of workers.
        steps: After how many of its steps a worker exchanges.
    """

    def __init__(self, client: ServerClient, gather: Gather, *, worker: int, worker_count: int, steps: int) -> None:
        self.parameters = GeoParameters(client, gather, worker=worker, worker_count=worker_count)
        self._client = client
        self._worker_count = worker_count
        self._most_steps = steps
        self._steps = 0
        self._is_training = False
        self._tables: list[GeoTable] = []

    def add_table(self, served: ServedTable) -> GeoTable:
        """Return this worker's rows of a table on the servers."""
        table = GeoTable(served, self._worker_count, lambda: self._is_training)
        self._tables = [each for each in self._tables if each.served is not served] + [table]
        return table

    def begin_step(self) -> None:
        """Begin a training step of this worker."""
        self._is_training = True

    def end_step(self) -> None:
        """End a step. After every so many of them, exchange."""
        self._is_training = False
        self._steps += 1
        if self._steps == self._most_steps:
            self._push_shares()
            self.parameters.take_others()
            for table in self._tables:
                table.take_others()

    def send(self) -> None:
        """Send shares of what this worker has trained since the last exchange, and wait until servers have them."""
        if self._steps:
            self._push_shares()
        self._client.wait_until_committed()

    def _push_shares(self) -> None:
        """Push shares as one transaction."""
        self._steps = 0
        pushes = [*self.parameters.make_pushes(), *(table.make_push() for table in self._tables)]
        if pushes:
            push_together(pushes)
        self._client.commit()

    def read_all(self) -> None:
        """Take the servers' values of everything."""
        self.parameters.pull_states()
        for table in self._tables:
            table.forget()

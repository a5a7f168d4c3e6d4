"""The tables of one of several workers: where their rows are, and when all workers see a step."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from rankless.context.world import StartedWorkers
from rankless.extensions.servers.config import ServersConfig, is_server_lost
from rankless.extensions.servers.service.client import ServerClient
from rankless.extensions.servers.service.served_table import ServedTable
from rankless.extensions.servers.service.server_connection import (
    ConnectionSettings,
    is_never_interrupted,
    require_no_interruption,
)
from rankless.extensions.servers.table_operators import request_rows
from rankless.extensions.servers.table_training import find_trainings
from rankless.extensions.servers.tables.row_store import RowStore
from rankless.extensions.servers.tables.table import Table
from rankless.extensions.servers.training.divided_pushes import PushDivision
from rankless.extensions.servers.training.geo_training import GeoExchange, GeoTable
from rankless.extensions.servers.training.own_steps import OwnSteps, StepsOnServers
from rankless.extensions.servers.training.replicated_table import Gather, ReplicatedTable
from rankless.extensions.servers.training.served_weights import ServedWeights

RECONNECT_SECONDS = 60.0
"""How long a worker waits for a server that has ended. The agent starts it again, or ends the run."""


class LossHandling(NamedTuple):
    """What workers do if one of them is lost; see Note [operations] in `context.world`. Default: nothing.

    Args:
        is_first: Whether this worker is the first one of those that are left.
        run_for_all: Makes an operation of all workers.
        is_interrupted: Whether a worker is lost, whose step a read may await.
        recover: Goes on without it.
        can_recover: Whether the others may continue.
    """

    is_first: Callable[[], bool]
    run_for_all: Callable[[Callable[[], Any]], Any] = lambda attempt: attempt()
    is_interrupted: Callable[[], bool] = is_never_interrupted
    recover: Callable[[], None] = require_no_interruption
    can_recover: bool = False


class WorkerTables:
    """Shares tables with the other workers: each holds all rows, or the servers of the run do.

    Args:
        gather: Exchanges bytes with the other workers.
        servers: The servers of the run. None: every worker holds all rows.
        worker: Number of this worker.
        worker_count: Number of workers.
        notify: Shows the user a notice.
        loss: What happens if a worker is lost. None: that ends the run.

    Raises:
        ServerError: A server cannot be reached.
    """

    def __init__(
        self,
        gather: Gather,
        servers: ServersConfig | None,
        *,
        worker: int,
        worker_count: int,
        notify: Callable[[str], None],
        loss: LossHandling | None = None,
    ) -> None:
        self._gather = gather
        self._loss = loss = loss or LossHandling(is_first=lambda: worker == 0)
        self._client: ServerClient | None = None
        self._own_steps: OwnSteps | None = None
        if servers is not None:
            settings = ConnectionSettings(
                RECONNECT_SECONDS,
                notify,
                is_interrupted=loss.is_interrupted,
                recover=loss.recover,
                is_lost=partial(is_server_lost, servers.lost_descriptor),
                defers=servers.mode != "sync",
            )
            self._client = client = ServerClient(servers, worker=worker, worker_count=worker_count, settings=settings)
            if servers.mode == "geo":
                self._own_steps = GeoExchange(
                    client, gather, worker=worker, worker_count=worker_count, steps=servers.geo_steps
                )
            elif servers.mode != "sync":
                self._own_steps = StepsOnServers(client, gather, is_first=worker == 0)
        self._opened = 0
        self._division = PushDivision(worker=worker, worker_count=worker_count, keeps=loss.can_recover)
        self._weights: ServedWeights | None = None
        if self._client is not None and self._own_steps is None:
            self._weights = ServedWeights(self._client, gather, self._division, is_first=loss.is_first)

    @property
    def weights(self) -> ServedWeights | None:
        """The weights of embeddings whose rows are on servers. None: each worker holds them."""
        return self._weights

    @property
    def sums_gradients(self) -> bool:
        """Whether a step has the gradients of all workers. Otherwise each worker makes steps of its own."""
        return self._own_steps is None

    @property
    def own_steps(self) -> OwnSteps:
        """The steps of this worker, where each trains on batches of its own."""
        assert self._own_steps is not None
        return self._own_steps

    def share(self, table: Table, before: RowStore | None) -> RowStore:
        """Return the store of all workers, with the rows of a table that is equal on all of them. Collective.

        Args:
            table: The table of this worker.
            before: The store that had the table's rows before it was loaded, if there is one.

        Raises:
            TableError: The workers' tables differ.
        """
        if self._client is not None:
            self._client.forget_early_rows()
        known = before.served if isinstance(before, GeoTable) else before
        is_known = isinstance(known, ServedTable) and known.settings == table.settings
        store: RowStore = self._loss.run_for_all(lambda: self._share(table, known if is_known else None))
        if self._client is not None and not is_known:
            self._opened += 1
        return store

    def _share(self, table: Table, known: RowStore | None) -> RowStore:
        """Return the store, which `known` is if the servers have the table."""
        replicated = ReplicatedTable(table, self._gather)
        if self._client is None:
            return replicated
        if isinstance(known, ServedTable):
            served = known
        else:
            served = self._client.open_table(f"table {self._opened}", table.settings)
        if served is known or table.step > 0:
            if self._loss.is_first():
                served.restore(table.contents())
            self._gather(b"")  # nobody reads before the rows are there; all have read what was there before
        return served if self._own_steps is None else self._own_steps.add_table(served)

    def share_weights(self, weights: Mapping[str, tuple[nn.Parameter, Optimizer]]) -> None:
        """Give the servers the rows of weights of embeddings with sparse gradients. Collective.

        Args:
            weights: Each weight and the optimizer that steps it, by its name. All are equal on all workers.

        Raises:
            TableError: The servers cannot hold a weight.
        """
        assert self._weights is not None
        self._weights.share(weights, self._loss.run_for_all)

    def request_rows(self, lookups: Iterable[tuple[int, Tensor]]) -> bool:
        """Ask for the rows that the next call is expected to look up. Return whether that has been of use so far."""
        is_of_use = request_rows(lookups)
        if self._client is not None:
            self._client.request_early_rows()
        return is_of_use

    def prepare(self, weights: Iterable[Tensor]) -> None:
        """Give the servers the gradients of a program that has run, before its step."""
        if self._client is not None:
            slices = [
                (training.table, training.prepare_program())
                for training in find_trainings(weights)
                if isinstance(training.table, ServedTable)
            ]
            self._client.prepare(slices)

    @property
    def committed(self) -> int:
        """How many steps this worker has committed."""
        return 0 if self._client is None else self._client.committed

    def regroup(self, workers: StartedWorkers, committed: int) -> None:
        """Go on without lost workers. `committed` is the last step that counts.

        Raises:
            LostWorkerError: This worker has changed tables outside of a step.
        """
        if self._client is not None:
            self._division.regroup(workers.lost, own_committed=self.committed, committed=committed)
            self._client.regroup(workers.lost, committed, workers.round)

    def commit(self) -> None:
        """End a step of a job, of all workers or of this one alone. Of all, it is one transaction on all servers."""
        if self._own_steps is not None:
            self._own_steps.end_step()
        elif self._client is not None:
            self._client.commit()
        self._division.end_step(self.committed)
        if self._weights is not None:
            self._weights.refresh()

    def finish(self) -> None:
        """Wait until servers have noted this worker's last step. Raises TableError if they could not make it."""
        if self._client is not None:
            self._client.finish()

    def close(self) -> None:
        """Leave the servers."""
        if self._client is not None:
            self._client.close()

"""The tables of one of several workers: where their rows are, and when all workers see a step."""

from collections.abc import Callable

from rankless.config.servers import ServersConfig
from rankless.parameter_server.geo_exchange import GeoExchange
from rankless.parameter_server.geo_table import GeoTable
from rankless.parameter_server.own_steps import OwnSteps, StepsOnServers
from rankless.parameter_server.replicated_table import Gather, ReplicatedTable
from rankless.parameter_server.served_weights import ServedWeights
from rankless.parameter_server.servers.client import ServerClient
from rankless.parameter_server.servers.served_table import ServedTable
from rankless.parameter_server.servers.server_connection import ConnectionSettings
from rankless.parameter_server.tables.row_store import RowStore
from rankless.parameter_server.tables.table import Table

RECONNECT_SECONDS = 60.0
"""How long a worker waits for a server that has ended. The agent starts it again, or ends the run."""


class WorkerTables:
    """Shares tables with the other workers: each holds all rows, or the servers of the run do.

    Args:
        gather: Exchanges bytes with the other workers.
        servers: The servers of the run. None: every worker holds all rows.
        worker: Number of this worker.
        worker_count: Number of workers.
        notify: Shows the user a notice.

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
    ) -> None:
        self._gather = gather
        self._is_first = worker == 0
        self._client: ServerClient | None = None
        self._own_steps: OwnSteps | None = None
        if servers is not None:
            settings = ConnectionSettings(RECONNECT_SECONDS, notify)
            self._client = client = ServerClient(servers, worker=worker, worker_count=worker_count, settings=settings)
            if servers.mode == "geo":
                self._own_steps = GeoExchange(
                    client, gather, worker=worker, worker_count=worker_count, steps=servers.geo_steps
                )
            elif servers.mode != "sync":
                self._own_steps = StepsOnServers(client, gather, is_first=self._is_first)
        self._opened = 0
        self._weights: ServedWeights | None = None
        if self._client is not None and self._own_steps is None:
            self._weights = ServedWeights(self._client, gather, worker=worker, worker_count=worker_count)

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
        replicated = ReplicatedTable(table, self._gather)
        if self._client is None:
            return replicated
        known = before.served if isinstance(before, GeoTable) else before
        if isinstance(known, ServedTable) and known.settings == table.settings:
            served = known
        else:
            served = self._client.open_table(f"table {self._opened}", table.settings)
            self._opened += 1
        if served is known or table.step > 0:
            if self._is_first:
                served.restore(table.contents())
            self._gather(b"")  # nobody reads before the rows are there; all have read what was there before
        return served if self._own_steps is None else self._own_steps.add_table(served)

    def commit(self) -> None:
        """End a step of a job, of all workers or of this one alone. Of all, it is one transaction on all servers."""
        if self._own_steps is not None:
            self._own_steps.end_step()
        elif self._client is not None:
            self._client.commit()
        if self._weights is not None:
            self._weights.refresh()

    def close(self) -> None:
        """Leave the servers."""
        if self._client is not None:
            self._client.close()

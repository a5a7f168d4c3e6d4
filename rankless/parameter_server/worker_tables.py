"""The tables of one of several workers: where their rows are, and when all workers see a step."""

from collections.abc import Callable

from rankless.config.servers import ServersConfig
from rankless.parameter_server.replicated_table import Gather, ReplicatedTable
from rankless.parameter_server.served_parameters import ServedParameters
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
        self._parameters: ServedParameters | None = None
        self.sums_gradients = servers is None or servers.mode == "sync"
        if servers is not None:
            settings = ConnectionSettings(RECONNECT_SECONDS, notify)
            self._client = ServerClient(servers, worker=worker, worker_count=worker_count, settings=settings)
        if self._client is not None and not self.sums_gradients:
            self._parameters = ServedParameters(self._client, gather, is_first=self._is_first)
        self._opened = 0

    @property
    def parameters(self) -> ServedParameters:
        """The dense parameters on servers, where workers train on batches of their own."""
        assert self._parameters is not None
        return self._parameters

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
        if isinstance(before, ServedTable) and before.settings == table.settings:
            served = before
        else:
            served = self._client.open_table(f"table {self._opened}", table.settings)
            self._opened += 1
        if served is before or table.step > 0:
            if self._is_first:
                served.restore(table.contents())
            self._gather(b"")  # nobody reads before the rows are there; all have read what was there before
        return served

    def begin_step(self) -> None:
        """Begin a step of a job in which this worker trains alone."""
        if self._client is not None:
            self._client.begin_step()

    def commit(self) -> None:
        """End a step of a job: one transaction on all servers, of all workers or of this one alone."""
        if self._client is not None:
            self._client.commit()

    def close(self) -> None:
        """Leave the servers."""
        if self._client is not None:
            self._client.close()

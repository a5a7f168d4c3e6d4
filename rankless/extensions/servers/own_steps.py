"""The steps of a worker that trains on batches of its own."""

from typing import Protocol

from rankless.context.table_sharing import WorkerSteps
from rankless.extensions.servers.replicated_table import Gather
from rankless.extensions.servers.served_parameters import ServedParameters
from rankless.extensions.servers.service.client import ServerClient
from rankless.extensions.servers.service.served_table import ServedTable
from rankless.extensions.servers.tables.row_store import RowStore


class OwnSteps(WorkerSteps, Protocol):
    """Those steps, as tables and servers take part in them. `geo_exchange` has another kind than this module."""

    def add_table(self, served: ServedTable) -> RowStore:
        """Return the rows of a table on the servers, as this worker trains them."""
        ...

    def end_step(self) -> None:
        """End a step of this worker."""
        ...


class StepsOnServers:
    """The modes `async` and `bounded`: servers make each step when its gradients arrive."""

    def __init__(self, client: ServerClient, gather: Gather, *, is_first: bool) -> None:
        self.parameters = ServedParameters(client, gather, is_first=is_first)
        self._client = client

    def add_table(self, served: ServedTable) -> ServedTable:
        """Return the table: a worker has no rows of its own."""
        return served

    def begin_step(self) -> None:
        """Begin a training step of this worker."""
        self._client.begin_step()

    def end_step(self) -> None:
        """End it: what this worker has pushed is one transaction. Parameters for the next one come meanwhile."""
        self._client.commit()
        self.parameters.request_early()

    def send(self) -> None:
        """Wait until the servers have made all steps of this worker, which have been sent."""
        self.parameters.forget_early()  # all workers are about to read the same values
        self._client.wait_until_committed()

    def read_all(self) -> None:
        """Take the servers' values and optimizer states of all parameters."""
        self.parameters.pull_states()

"""When a worker that trains on its own exchanges rows and parameters with servers; see Note [geo] in `geo_table`."""

from rankless.extensions.servers.geo_parameters import GeoParameters
from rankless.extensions.servers.geo_table import GeoTable
from rankless.extensions.servers.replicated_table import Gather
from rankless.extensions.servers.service.client import ServerClient
from rankless.extensions.servers.service.served_table import ServedTable, push_together


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

"""The steps of a worker that trains on batches of its own."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from rankless.extensions.servers.replicated_table import Gather
from rankless.extensions.servers.served_parameters import ServedParameters
from rankless.extensions.servers.service.client import ServerClient
from rankless.extensions.servers.service.served_table import ServedTable
from rankless.extensions.servers.tables.row_store import RowStore


class SharedParameters(Protocol):
    """The dense parameters that servers hold, where workers train on batches of their own."""

    def share(
        self,
        optimizers: Iterable[Optimizer],
        table_weights: Iterable[Tensor],
        sparse_weights: Iterable[Tensor],
        *,
        is_current: bool,
        compares: bool,
    ) -> None:
        """Give the servers parameters that they do not have, or that the script has changed. Collective.

        Args:
            optimizers: Those of a job.
            table_weights: Parameters that stand for tables.
            sparse_weights: Weights of embeddings with sparse gradients.
            is_current: Whether this worker has the values of the servers. If not, the script may change nothing.
            compares: Whether to look for changes in the elements, too.
        """
        ...

    def pull(self, parameters: Iterable[Tensor]) -> None:
        """Take the servers' values of parameters."""
        ...

    def pull_states(self) -> None:
        """Take the servers' values and optimizer states of all parameters."""
        ...

    def find_changed(self, parameters: Iterable[Tensor]) -> Tensor | None:
        """Return the first parameter that has been changed since its values were read."""
        ...

    def step_on_servers(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Within the context, a step of the optimizer is made by the servers."""
        ...


class OwnSteps(Protocol):
    """The steps of a worker that trains on batches of its own. `geo_exchange` has another kind than this module."""

    @property
    def parameters(self) -> SharedParameters:
        """The dense parameters."""
        ...

    def begin_step(self) -> None:
        """Begin a training step of this worker."""
        ...

    def send(self) -> None:
        """Send to the servers what this worker has trained."""
        ...

    def read_all(self) -> None:
        """Take the servers' values of everything."""
        ...

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

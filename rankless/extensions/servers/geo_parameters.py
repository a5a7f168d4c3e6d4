"""Dense parameters that a worker trains on its own, and exchanges with servers; see Note [geo] in `geo_table`."""

import contextlib
from collections.abc import Iterable

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from rankless.errors import TableError
from rankless.extensions.servers.geo_table import ADD
from rankless.extensions.servers.parameter_rows import Floats, ParameterRows, pull_rows
from rankless.extensions.servers.parameter_states import ParameterStates
from rankless.extensions.servers.replicated_table import Gather
from rankless.extensions.servers.service.client import ServerClient
from rankless.extensions.servers.service.served_table import TablePush


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

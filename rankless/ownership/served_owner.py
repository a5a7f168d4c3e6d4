"""States of jobs whose parameters servers hold: workers compute gradients, and servers step."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch.optim import Optimizer

from rankless.ownership.state_owner import WholeOwner

StepOnServers = Callable[[Optimizer], AbstractContextManager[None]]
"""Returns a context in which the servers make an optimizer's step."""


class ServedOwner(WholeOwner):
    """Every worker has a copy of everything, and the servers step the parameters."""

    def __init__(self, step_on_servers: StepOnServers) -> None:
        self._step_on_servers = step_on_servers

    def step(self, optimizer: Optimizer) -> None:
        """Send the gradients to the servers, which make the step."""
        with self._step_on_servers(optimizer):
            optimizer.step()

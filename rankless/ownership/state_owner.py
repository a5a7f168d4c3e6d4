"""What a job does with parameters, gradients and optimizer state, whoever holds them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from rankless.ownership.unread_tensor import UnreadTensor
from rankless.parallel.mesh import Mesh, WorkerGroup
from rankless.parallel.tensor_placement import BlockedShard, Shard


@dataclass(frozen=True)
class Replica:
    """What a worker holds of a parameter, a buffer or a tensor of optimizer state."""

    local: Tensor
    """All of it, or this worker's shard."""
    divided_along: Sequence[WorkerGroup] = ()
    """The axes whose workers hold different shards; empty if all hold the whole."""

    def is_shared(self, mesh: Mesh) -> bool:
        """Whether another worker holds the same."""
        return mesh.size > math.prod(axis.size for axis in self.divided_along)

    def find_first_ranks(self, mesh: Mesh) -> Sequence[int]:
        """Return for each worker of the mesh the first one that holds the same."""
        places = [[mesh.find_rank_along(axis, rank) for axis in self.divided_along] for rank in range(mesh.size)]
        return [places.index(place) for place in places]

    def list_groups(self, mesh: Mesh) -> list[WorkerGroup]:
        """Return the groups along which this worker and others hold the same; after one another they reach all."""
        if not self.divided_along:
            return [mesh]
        known = set(map(id, self.divided_along))
        return [axis for axis in mesh.axes if id(axis) not in known and axis.size > 1]


class GradientSums(Protocol):
    """The gradients that calls of a job have accumulated for shards of parameters."""

    def find_sum(self, holder: Tensor) -> Tensor | None:
        """Return the gradient that is accumulated for a shard; None if there is none."""
        ...

    def make_sum_whole(self, parameter: Tensor, shards: Sequence[Tensor], whole: Tensor) -> None:
        """Let a parameter hold its whole accumulated gradient, in place of its shards."""
        ...


class StateOwner:
    """Holds the state of jobs: here every worker holds everything. Owners that divide states derive from it.

    A *holder* of a parameter is the tensor that has this worker's gradient of it as `.grad`: the parameter itself, or
    this worker's shard of it.
    """

    @property
    def version(self) -> int:
        """Changes whenever more parameters are divided."""
        return 0

    def begin_call(self) -> None:
        """Prepare the states for a call of a job, after the script may have changed them. Collective."""

    def end_call(self) -> None:
        """Show the script the states as a call has left them. Collective."""

    def get_holders(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return the holder of each parameter."""
        return list(parameters)

    def take_gradients(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Give the holder of each parameter a new gradient, as a program has computed it."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient

    def copy_gradients(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> Callable[[], None]:  # noqa: ARG002
        """Send gradients to the workers that have copies of shards. Return a function that takes those of this worker.

        Collective if there are copies; see Note [copies of shards].
        """
        return lambda: None

    def get_copies(self, parameter: Tensor) -> dict[int, Tensor]:  # noqa: ARG002
        """Return the copies of other workers' shards of a parameter that have gradients of their own, by worker."""
        return {}

    def copy_gradient(self, parameter: Tensor, whole: Tensor, worker: int) -> Tensor:  # noqa: ARG002
        """Return a copy of what the copy of a worker's shard of a parameter has of a whole gradient."""
        return whole.clone()

    def measure_copies(self, parameters: Sequence[Tensor], optimizers: Sequence[Optimizer]) -> int:  # noqa: ARG002
        """Return the bytes of this worker's copies of other workers' shards, with their gradients and states."""
        return 0

    def note_sums(self, sums: GradientSums) -> None:
        """Note what accumulates gradients, which are made whole after a worker was lost."""

    def get_value(self, tensor: Tensor) -> Tensor:
        """Return what this worker has of a parameter or buffer: all of it, or its shard."""
        return tensor

    def get_inputs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return what a program takes of divided parameters and buffers, which it only reads. Collective.

        That is what this worker has of each, or the whole value in memory that workers share.
        """
        return list(tensors)

    def find_shared_memory(self, tensor: Tensor) -> int | None:  # noqa: ARG002
        """Return the number of the memory in which workers share the whole value; None if they do not."""
        return None

    def begin_write(self) -> None:
        """Wait until no worker reads values that workers share, before the script writes to shards. Collective."""

    def set_value(self, tensor: Tensor, whole: Tensor) -> None:
        """Take a new whole value. Collective."""
        with torch.no_grad():
            tensor.copy_(whole)

    def find_value_placements(self, tensor: Tensor) -> dict[str, Shard | BlockedShard]:  # noqa: ARG002
        """Return how the value of a parameter or buffer is divided, by axis; nothing for a whole one.

        Axes are in the order in which they divide it, each what those before it leave on this worker.
        """
        return {}

    def find_copies(self, tensor: Tensor) -> tuple[int, ...]:  # noqa: ARG002
        """Return the workers that have a copy of what one worker has of a parameter; see Note [copies of shards]."""
        return ()

    def find_replica(self, tensor: Tensor) -> Replica:
        """Return what this worker holds of a parameter, buffer or optimizer state, and who must hold the same."""
        return Replica(tensor)

    def find_gradient_placements(self, parameter: Tensor) -> dict[str, Shard | BlockedShard]:  # noqa: ARG002
        """Return how the gradient of a parameter is divided, by axis; nothing for a whole one."""
        return {}

    def gather_gradient(self, parameter: Tensor) -> Tensor | None:
        """Return the whole gradient of a parameter; None if it has none. Collective."""
        return parameter.grad

    def divide_gradient(self, parameter: Tensor, whole: Tensor) -> Tensor:  # noqa: ARG002
        """Return a copy of what this worker holds of a whole gradient."""
        return whole.clone()

    def take_state(self, parameter: Tensor, key: str, stored: UnreadTensor) -> Tensor:  # noqa: ARG002
        """Return an entry of a parameter's optimizer state as this worker holds it, read as far as it needs it."""
        return stored

    def find_axes(self, holder: Tensor) -> tuple[WorkerGroup, ...]:  # noqa: ARG002
        """Return the axes whose workers have shards of the gradient of which a holder has one."""
        return ()

    def measure_norm(self, holders: Sequence[Tensor]) -> Tensor:
        """Return the norm of the whole gradient. Collective."""
        return get_total_norm([item.grad for item in holders if item.grad is not None]).detach().clone()

    def find_not_finite(self, holders: Sequence[Tensor]) -> int | None:
        """Return the number of the first holder whose gradient is not finite on some worker. Collective."""
        numbered = [(number, get_elements(item.grad)) for number, item in enumerate(holders) if item.grad is not None]
        largest = torch._foreach_norm([gradient for _, gradient in numbered], float("inf")) if numbered else ()
        pairs = zip(numbered, largest, strict=True)
        # One read of the device for all gradients; only a step that fails looks at each.
        if not numbered or bool(torch.stack([item.isfinite() for item in largest]).all()):
            return None
        return next(number for (number, _), size in pairs if not bool(size.isfinite()))

    def step(self, optimizer: Optimizer) -> None:
        """Let an optimizer step. Collective."""
        optimizer.step()

    def collect_states(self, mesh: Mesh, *, with_gradients: bool) -> Callable[[], None]:  # noqa: ARG002
        """Return a function that makes all states whole on this worker, after another one was lost. Collective.

        Args:
            mesh: The workers that are left.
            with_gradients: Whether a step follows with the gradients that workers have.
        """
        return lambda: None


def get_elements(gradient: Tensor) -> Tensor:
    """Return the elements that a gradient has in memory: all of a dense one, the terms of a sparse one's sums."""
    return gradient._values() if gradient.layout == torch.sparse_coo else gradient

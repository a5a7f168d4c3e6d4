"""What a worker holds of a tensor, and which other workers hold the same: those that compare and share it."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rankless.parallel.mesh import Mesh, WorkerGroup


@dataclass(frozen=True)
class Replica:
    """What a worker holds of a parameter, a buffer or a tensor of optimizer state.

    Attributes:
        local (Tensor): All of it, or this worker's piece.
        divided_along (WorkerGroup | None): The axis whose workers hold different pieces. None if all hold the whole.
    """

    local: Tensor
    divided_along: WorkerGroup | None = None

    def is_shared(self, mesh: Mesh) -> bool:
        """Whether another worker holds the same."""
        return mesh.size > (1 if self.divided_along is None else self.divided_along.size)

    def find_first_ranks(self, mesh: Mesh) -> Sequence[int]:
        """Return for each worker of the mesh the first one that holds the same."""
        axis = self.divided_along
        if axis is None:
            return [0] * mesh.size
        along = [mesh.find_rank_along(axis, rank) for rank in range(mesh.size)]
        return [along.index(place) for place in along]

    def list_groups(self, mesh: Mesh) -> list[WorkerGroup]:
        """Return the groups along which this worker and others hold the same; after one another they reach all."""
        axis = self.divided_along
        return [mesh] if axis is None else [other for other in mesh.axes if other is not axis and other.size > 1]

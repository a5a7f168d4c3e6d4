"""What a worker holds of a tensor, and which other workers hold the same: those that compare and share it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rankless.parallel.mesh import Mesh, WorkerGroup


@dataclass(frozen=True)
class Replica:
    """What a worker holds of a parameter, a buffer or a tensor of optimizer state.

    Attributes:
        local (Tensor): All of it, or this worker's piece.
        divided_along (Sequence[WorkerGroup]): The axes whose workers hold different pieces. None if all hold the whole.
    """

    local: Tensor
    divided_along: Sequence[WorkerGroup] = ()

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

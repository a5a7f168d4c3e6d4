"""How the states of a program are stored: in which memory, and which of them a worker holds in pieces."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rankless.compiler.ir.logical_program import LogicalProgram, LogicalValue
from rankless.compiler.scheduling.gradient_memory import GradientLayout, GradientMemory, find_gradient_layout
from rankless.ownership.piece_layout import PieceLayout, make_dense_strides, order_dims
from rankless.parallel.mesh import MeshAxis
from rankless.parallel.tensor_placement import Shard, Sharding, compute_local_shape

SMALL_GROUP_BYTES, LARGE_GROUP_BYTES = 2**20, 25 * 2**20
GROUPS = 24
"""Groups of a model whose size lies between these."""


@dataclass(frozen=True, kw_only=True)
class StateStorage:
    """The placements of states between calls, by name. States without one are whole.

    Programs use whole values of those in `values`, along one axis. Passes after lowering gather those that workers do
    not share, and scatter gradients. Programs use those in `shardings` as they are stored.
    """

    axis: MeshAxis | None = None
    values: Mapping[str, Shard] = field(default_factory=dict)
    shared: Mapping[str, int] = field(default_factory=dict)
    """The values that a program reads whole in memory that workers share: the number of the memory of each."""
    gradients: Mapping[str, Shard] = field(default_factory=dict)
    shardings: Mapping[str, Sharding] = field(default_factory=dict)
    """The shardings of states whose pieces a program uses, and whose gradients it returns in pieces."""
    ranks: tuple[int, ...] = ()
    """This worker's rank along each axis of these shardings."""
    memory: GradientMemory = field(default_factory=GradientMemory)
    """The memory of gradients, which the programs of a job share."""

    def with_new_memory(self) -> "StateStorage":
        """Return the same placements with other memory of gradients."""
        return replace(self, memory=GradientMemory())

    def find_own_layout(self, name: str, parameter: LogicalValue) -> GradientLayout:
        """Return the layout in which a program computes a parameter's gradient.

        Args:
            name: The parameter's name.
            parameter: The whole parameter.
        """
        sharding = self.shardings.get(name)
        if sharding is None:
            return find_gradient_layout(parameter)
        shape = compute_local_shape(parameter.shape, sharding, self.ranks)
        return GradientLayout(tuple(shape), make_dense_strides(shape, order_dims(parameter.strides)))

    def find_gradient_layout(self, program: LogicalProgram, name: str, value: LogicalValue) -> PieceLayout | None:
        """Return how the gradient of a parameter is divided; None for a whole one.

        Args:
            program: The program that computes it.
            name: The parameter's name.
            value: The gradient.
        """
        placement = self.gradients.get(name)
        if placement is None:
            return None
        parameters = {described.name: node.meta["val"] for node, described in program.inputs.items()}
        return make_layout(parameters.get(name, value), placement)


def limit_group(sizes: Sequence[int]) -> int:
    """Return the most bytes of parameters, or of gradients, that are whole in one group.

    A group is small against all of them, because the memory of a group is what is saved for all others, but not so
    small that collectives cost more than what they send.

    Args:
        sizes: The bytes of all of them.
    """
    return min(LARGE_GROUP_BYTES, max(SMALL_GROUP_BYTES, *sizes, sum(sizes) // GROUPS))


def make_layout(value: LogicalValue, placement: Shard) -> PieceLayout:
    """Return the layout of a dense logical value that is divided."""
    return PieceLayout(tuple(map(int, value.shape)), order_dims(value.strides), placement)

"""How the states of a program are stored: in which memory, and which of them a worker holds in pieces."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rankless.compiler.ir.logical_program import LogicalProgram, LogicalValue
from rankless.compiler.scheduling.gradient_memory import GradientLayout, GradientMemory, find_gradient_layout
from rankless.ownership.shard_layout import ShardLayout, make_dense_strides, order_dims
from rankless.parallel.mesh import MeshAxis
from rankless.parallel.tensor_placement import Shard, Sharding, compute_local_shape

SMALL_GROUP_BYTES, LARGE_GROUP_BYTES = 2**20, 25 * 2**20
GROUPS = 24
"""Groups of a model whose size lies between these."""


@dataclass(frozen=True, kw_only=True)
class StateStorage:
    """The placements of states between calls, by name. States without one are whole.

    Programs use those in `shardings` as they are stored. Of those in `values` they use what the workers along one axis
    have together: passes after lowering gather those that workers do not share, and scatter gradients.
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
    owned: Mapping[str, Shard] = field(default_factory=dict)
    """The states that only the worker of their stage has, with their gradients, as the axis `pipeline` divides them."""
    copies: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The workers along the axis `pipeline` that have copies of these states; see Note [copies of shards]."""
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
        if name not in self.shardings:
            return find_gradient_layout(parameter)
        shape = self.get_own_shape(name, parameter)
        return GradientLayout(shape, make_dense_strides(shape, order_dims(parameter.strides)))

    def get_own_shape(self, name: str, value: LogicalValue) -> tuple[int, ...]:
        """Return the shape of what a program uses of a state, or computes of its gradient."""
        sharding = self.shardings.get(name)
        return tuple(value.shape if sharding is None else compute_local_shape(value.shape, sharding, self.ranks))

    def get_shard_shape(self, name: str, value: LogicalValue, stage_worker: int) -> tuple[int, ...]:
        """Return the shape of what a worker holds of a gradient.

        Args:
            name: The parameter's name.
            value: The gradient.
            stage_worker: The worker's rank along the axis `pipeline`.
        """
        shape = list(self.get_own_shape(name, value))
        owned, placement = self.owned.get(name), self.gradients.get(name)
        if owned is not None:
            is_copy = stage_worker in self.copies.get(name, ())
            shape[owned.dim] = max(owned.lengths) if is_copy else owned.lengths[stage_worker]
        if placement is not None and self.axis is not None:
            shape[placement.dim] = placement.lengths[self.axis.rank]
        return tuple(shape)

    def find_owner(self, name: str) -> int | None:
        """Return the worker along the axis `pipeline` that alone has rows of a state.

        None: it has none either, because another axis has given them to other workers.
        """
        return next((worker for worker, length in enumerate(self.owned[name].lengths) if length), None)

    def make_layout(self, name: str, value: LogicalValue, placement: Shard) -> ShardLayout:
        """Return how what a program uses of a dense state is divided between the workers along the axis."""
        shape = tuple(map(int, self.get_own_shape(name, value)))
        return ShardLayout(shape, order_dims(value.strides), placement)

    def find_gradient_layout(self, program: LogicalProgram, name: str, value: LogicalValue) -> ShardLayout | None:
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
        return self.make_layout(name, parameters.get(name, value), placement)


def limit_group(sizes: Sequence[int]) -> int:
    """Return the most bytes of parameters, or of gradients, that are whole in one group.

    A group is small against all of them, because the memory of a group is what is saved for all others, but not so
    small that collectives cost more than what they send.

    Args:
        sizes: The bytes of all of them.
    """
    return min(LARGE_GROUP_BYTES, max(SMALL_GROUP_BYTES, *sizes, sum(sizes) // GROUPS))

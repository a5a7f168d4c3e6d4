"""The gradients of which each rank keeps its shard between a backward pass and a step.

A bucket of such gradients ends in a reduce-scatter in place of an all-reduce. `.grad` then is a divided tensor, which
the script sees as whole: the first function that needs its elements gathers them. See Note [divided tensors].
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from rankless.ownership.partitioned_tensor import Partition, PartitionedTensor, WholeValues, make_partitioned_tensor
from rankless.ownership.shard_layout import ShardLayout
from rankless.parallel.mesh import MeshAxis


class GradientShards:
    """Knows whose gradients are divided.

    Args:
        axis: The ranks.
        require_all: Called with what is about to be gathered. Raises if not all ranks take part.

    Attributes:
        axis: The ranks.
        values: The whole values that the script uses of divided gradients and of divided optimizer state.
    """

    def __init__(self, axis: MeshAxis, require_all: Callable[[str], None]) -> None:
        self.axis = axis
        self.values = WholeValues(axis, require_all)
        self._layouts: Any = WeakIdKeyDictionary()

    def divide(self, parameter: Tensor, layout: ShardLayout) -> None:
        """Divide the gradients of a parameter from the next backward pass on."""
        self._layouts[parameter] = layout

    def find(self, leaf: Tensor) -> ShardLayout | None:
        """Return how the gradient of a leaf is divided; None for one that is whole on each rank."""
        layout: ShardLayout | None = self._layouts.get(leaf) if len(self._layouts) else None
        return layout if layout is not None and layout.shape == tuple(leaf.shape) else None

    def show(self, layout: ShardLayout, shard: Tensor) -> PartitionedTensor:
        """Return a gradient of which this rank has a shard, as the script sees it."""
        return make_partitioned_tensor(Partition(layout, shard, "a gradient", self.values, device=shard.device))


def add_to_shard(before: Tensor, new: Tensor) -> bool:
    """Add a divided gradient to an earlier one, and return True, if both have shards alone."""
    if isinstance(before, PartitionedTensor) and isinstance(new, PartitionedTensor):
        own, other = before.partition, new.partition
        if own.layout == other.layout and own.whole is None:
            own.shard.add_(other.shard)
            return True
    return False

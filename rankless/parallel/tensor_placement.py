"""The placement of a logical value on one mesh axis, by PyTorch's own classes, with shard lengths.

`Shard` has the length of every rank's piece, because uneven pieces are normal: a batch of 7 x 10 tokens on two ranks
flattens to 40 + 30 tokens, not 35 + 35.

Note [dims of several blocks]: one weight often holds several side by side, as the queries, keys and values of
attention in the rows of one matrix. The heads of each must be divided alike, so a rank has its rows of every block.
The same holds for the heads of several sequences in one dim. That is `BlockedShard`. It is no `Shard`, so that code
which does not know of blocks does not divide them wrongly. An outer axis may divide the dim too, between blocks.
"""

from collections.abc import Sequence

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate
from torch.distributed.tensor.placement_types import Shard as TorchShard

__all__ = [
    "BlockedShard",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "Sharding",
    "compute_local_shape",
    "is_divided_along",
    "split_lengths",
]

Sharding = tuple[Placement, ...]
"""One placement per axis of a mesh, from the outermost. The lengths of an axis divide what the axes before it leave."""


def split_lengths(length: int, parts: int) -> tuple[int, ...]:
    """Return the lengths of `length` rows split over `parts` ranks: the first `length % parts` get one row more."""
    # One formula for every remainder, so that it does not fix a symbolic length (Note [sizes that vary]).
    return tuple((length + (parts - 1 - part)) // parts for part in range(parts))


class Shard(TorchShard):
    """Split along `dim`: rank r holds `lengths[r]` rows, in the order of ranks."""

    lengths: tuple[int, ...]

    def __new__(cls, dim: int, _lengths: tuple[int, ...]) -> "Shard":
        """Construct PyTorch's part, which takes the dim alone."""
        return super().__new__(cls, dim)  # type: ignore[call-arg]  # a C++ class without stubs

    def __init__(self, dim: int, lengths: tuple[int, ...]) -> None:
        super().__init__(dim)
        self.lengths = lengths

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shard) and (self.dim, self.lengths) == (other.dim, other.lengths)

    def __hash__(self) -> int:
        # Symbolic lengths have no hash. Few placements differ in nothing else.
        return hash(self.dim)

    def __repr__(self) -> str:
        return f"Shard({self.dim}, {list(self.lengths)})"

    def start(self, rank: int) -> int:
        """Return the index of the first row that `rank` holds."""
        return sum(self.lengths[:rank])


class BlockedShard(Placement):
    """Split each block of `sum(lengths)` rows of `dim`: rank r holds `lengths[r]` rows of every block.

    See Note [dims of several blocks].
    """

    dim: int
    lengths: tuple[int, ...]

    def __init__(self, dim: int, lengths: tuple[int, ...]) -> None:
        super().__init__()
        self.dim = dim
        self.lengths = lengths

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockedShard) and (self.dim, self.lengths) == (other.dim, other.lengths)

    def __hash__(self) -> int:
        return hash((BlockedShard, self.dim))  # without the lengths, which may be symbolic

    def __repr__(self) -> str:
        return f"BlockedShard({self.dim}, {list(self.lengths)})"

    def start(self, rank: int) -> int:
        """Return the index, within each block, of the first row that `rank` holds."""
        return sum(self.lengths[:rank])

    @property
    def block(self) -> int:
        """The number of rows of a block."""
        return sum(self.lengths)

    def count_rows(self, rows: int) -> tuple[int, ...]:
        """Return how many of so many rows each rank holds, of all blocks together."""
        return tuple(rows // self.block * length for length in self.lengths)


def is_divided_along(placement: Placement, dim: int) -> bool:
    """Return whether an axis divides this dim of a value."""
    return isinstance(placement, Shard | BlockedShard) and placement.dim == dim


def compute_local_shape(shape: Sequence[int], sharding: Sharding, ranks: Sequence[int]) -> list[int]:
    """Return the shape of one worker's piece of a logical value.

    Args:
        shape: The logical shape.
        sharding: One placement per axis.
        ranks: The worker's rank along each axis.
    """
    sizes = list(shape)
    for placement, rank in zip(sharding, ranks, strict=True):
        if isinstance(placement, Shard):
            sizes[placement.dim] = placement.lengths[rank]
        elif isinstance(placement, BlockedShard):
            sizes[placement.dim] = placement.count_rows(sizes[placement.dim])[rank]
    return sizes

"""The placement of a logical value on one mesh axis, by PyTorch's own classes, with shard lengths.

`Shard` has the length of every rank's shard, because uneven shards are normal: a batch of 7 x 10 tokens on two ranks
flattens to 40 + 30 tokens, not 35 + 35.

Note [dims of several blocks]: one weight often holds several side by side, as the queries, keys and values of
attention in the rows of one matrix. The heads of each must be divided alike, so a rank has its rows of every block.
The same holds for the heads of several sequences in one dim. That is `BlockedShard`. It is no `Shard`, so that code
which does not know of blocks does not divide them wrongly. An outer axis may divide the dim too, between blocks.

Note [values on one rank]: an expert that is a module of its own is on one rank, with all that is computed of it. That
is `OnRank`: one rank has the whole value, and the others have nothing. It has no dim, so other axes may divide the
value along any. As local values the others have tensors without rows, which nothing reads. A stored parameter is
`Shard` then, with all rows on one rank.
"""

from collections.abc import Sequence

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate
from torch.distributed.tensor.placement_types import Shard as TorchShard

__all__ = [
    "BlockedShard",
    "OnRank",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "Sharding",
    "compute_local_shape",
    "find_only_rank",
    "is_absent",
    "is_divided_along",
    "read_stored",
    "remove_owners",
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


class OnRank(Placement):
    """The whole value on one rank of the axis, and nothing on the others; see Note [values on one rank]."""

    rank: int

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OnRank) and self.rank == other.rank

    def __hash__(self) -> int:
        return hash((OnRank, self.rank))

    def __repr__(self) -> str:
        return f"OnRank({self.rank})"


def find_only_rank(placement: Placement) -> int | None:
    """Return the rank of several that has all rows of a divided value; None if several have some."""
    if not isinstance(placement, Shard) or len(placement.lengths) == 1:
        return None
    owners = [rank for rank, length in enumerate(placement.lengths) if not isinstance(length, int) or length > 0]
    return owners[0] if len(owners) == 1 else None


def read_stored(placement: Placement) -> Placement:
    """Return how an operator finds a state that is stored in shards, of which one rank may have all rows."""
    owner = find_only_rank(placement)
    return placement if owner is None else OnRank(owner)


def is_absent(sharding: Sharding, ranks: Sequence[int]) -> bool:
    """Return whether a worker has nothing of a value, because one along some axis has it.

    Args:
        sharding: One placement per axis.
        ranks: The worker's rank along each axis.
    """
    pairs = zip(sharding, ranks, strict=True)
    return any(isinstance(placement, OnRank) and placement.rank != rank for placement, rank in pairs)


def is_divided_along(placement: Placement, dim: int) -> bool:
    """Return whether an axis divides this dim of a value."""
    return isinstance(placement, Shard | BlockedShard) and placement.dim == dim


def remove_owners(sharding: Sharding) -> Sharding:
    """Return the sharding of a value where it is: as if all workers along its axis had it."""
    return tuple(Replicate() if isinstance(placement, OnRank) else placement for placement in sharding)


def compute_local_shape(shape: Sequence[int], sharding: Sharding, ranks: Sequence[int]) -> list[int]:
    """Return the shape of one worker's shard of a logical value.

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
    if sizes and is_absent(sharding, ranks):
        sizes[0] = 0
    return sizes

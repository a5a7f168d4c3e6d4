"""Parts of a logical tensor: ranges of some of its dims."""

from collections.abc import Sequence

from torch import Tensor

from rankless.parallel.tensor_placement import BlockedShard, Shard, Sharding, is_absent

Part = tuple[int, int, int]
"""A range of one dim: the dim, the first index and the length."""


def list_parts(sharding: Sharding, ranks: Sequence[int]) -> tuple[Part, ...]:
    """Return one worker's part of a value as ranges of different dims; none if it has the whole.

    A worker without the value has no rows of dim 0.

    Args:
        sharding: One placement per axis. If several divide one dim, each divides what the one before it leaves.
        ranks: The worker's rank along each axis.
    """
    found: dict[int, tuple[int, int]] = {}
    for placement, rank in zip(sharding, ranks, strict=True):
        assert not isinstance(placement, BlockedShard), "a part of every block of a dim is no range"
        if isinstance(placement, Shard):
            start, _ = found.get(placement.dim, (0, 0))
            found[placement.dim] = (start + placement.start(rank), placement.lengths[rank])
    if is_absent(sharding, ranks):
        found[0] = (0, 0)
    return tuple((dim, start, length) for dim, (start, length) in found.items())


def take_parts(value: Tensor, parts: Sequence[Part]) -> Tensor:
    """Return these ranges of a whole value in memory of their own; the value itself if there are none."""
    if not parts:
        return value
    for part in parts:
        value = value.narrow(*part)
    return value.clone()

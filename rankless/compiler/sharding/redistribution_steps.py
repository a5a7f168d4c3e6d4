"""The steps of a redistribution between two shardings: which axis changes when."""

from rankless.compiler.tracing.row_selections import is_reordered
from rankless.parallel.tensor_placement import BlockedShard, OnRank, Partial, Placement, Replicate, Shard, Sharding


def list_steps(source: Sharding, target: Sharding) -> list[Sharding]:
    """Return the shardings from one to another, each of which differs from the one before it along one axis.

    Where an axis divides a dim, the lengths of the axes after it on this dim hold for its pieces only. So these are
    made whole before it changes, and divided again afterwards.
    """
    changed = {number for number, pair in enumerate(zip(source, target, strict=True)) if pair[0] != pair[1]}
    dims = {
        number: {item.dim for item in (source[number], target[number]) if isinstance(item, Shard | BlockedShard)}
        for number in changed
    }
    nested = {
        number
        for number, placement in enumerate(source)
        if isinstance(placement, Shard | BlockedShard)
        and any(placement.dim in dims[outer] for outer in changed if outer < number)
    }
    steps, current = [], source
    for number in reversed(range(len(source))):
        pair = source[number], target[number]
        if number in nested or (number in changed and needs_whole(*pair)):
            current = replace_placement(current, number, Replicate())
            steps.append(current)
    for number in range(len(source)):
        if current[number] != target[number]:
            current = replace_placement(current, number, target[number])
            steps.append(current)
    return steps


def needs_whole(source: Placement, target: Placement) -> bool:
    """Return whether no single collective leads from one placement to the other."""
    if is_reordered([source, target]):
        return not (isinstance(source, Replicate) or isinstance(target, Replicate))
    if isinstance(source, BlockedShard) or isinstance(target, BlockedShard):
        return not (isinstance(source, Replicate) or isinstance(target, Replicate))
    if not isinstance(target, Shard | OnRank):
        return False
    is_resize = isinstance(source, Shard) and isinstance(target, Shard) and source.dim == target.dim
    moves = isinstance(source, OnRank) and isinstance(target, OnRank)
    return is_resize or moves or (isinstance(source, Partial) and source.reduce_op != "sum")


def replace_placement(sharding: Sharding, number: int, placement: Placement) -> Sharding:
    """Return a sharding with another placement along one axis."""
    return (*sharding[:number], placement, *sharding[number + 1 :])

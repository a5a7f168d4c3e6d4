"""Where a program leaves a gradient along one axis."""

from rankless.parallel.tensor_placement import BlockedShard, OnRank, Partial, Placement, Replicate, Shard


def place_gradient(computed: Placement, stored: Placement) -> Placement:
    """Return the placement in which a program returns a gradient along one axis.

    Args:
        computed: The placement in which it is computed.
        stored: That of its parameter.
    """
    if isinstance(stored, Shard | BlockedShard | OnRank):
        return stored
    return computed if isinstance(computed, Partial) else Replicate()

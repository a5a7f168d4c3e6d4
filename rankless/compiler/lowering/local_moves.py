"""Changes of a placement for which a rank needs no other one, besides those to a part of the rows."""

from torch import fx

from rankless.compiler.ir import local_kernels
from rankless.compiler.ir.blocked_dims import slice_blocks
from rankless.compiler.rules.strategy import GraphBuilder
from rankless.parallel.mesh import MeshAxis
from rankless.parallel.tensor_placement import BlockedShard, OnRank, Partial, Placement, Replicate


def move_locally(
    builder: GraphBuilder, value: fx.Node, axis: MeshAxis, before: Placement, after: Placement, shape: list[int]
) -> fx.Node | None:
    """Return a value in another placement along an axis; None if ranks must exchange something.

    Args:
        builder: Adds operators to the rank's program.
        value: This rank's value.
        axis: The axis.
        before: The placement of the value.
        after: The wanted placement.
        shape: The shape of what the ranks along the axis have together.
    """
    match before, after:
        case Replicate(), BlockedShard():
            start, length = after.start(axis.rank), after.lengths[axis.rank]
            return builder.call(slice_blocks, value, after.dim, after.block, start, length)
        case Replicate(), OnRank():
            return value if after.rank == axis.rank else builder.call(local_kernels.make_absent, value)
        case Replicate(), _:
            return builder.call(local_kernels.keep_on_rank_zero, value, axis.rank)
        case OnRank(), Partial():
            return value if before.rank == axis.rank else builder.call(local_kernels.make_zeros, value, tuple(shape))
    return None

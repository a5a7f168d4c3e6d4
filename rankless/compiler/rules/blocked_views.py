"""Rules for views that take apart, or put together, a dim of several blocks.

See `tensor_placement`, Note [dims of several blocks]. One matrix often has the queries, keys and values of attention
in its rows. If each rank has its heads of every block, then cutting the product at the borders of the blocks gives each
rank its heads of queries, of keys and of values, and it sends nothing.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch

from rankless.compiler.rules.strategy import (
    GraphBuilder,
    LocalValue,
    LoweringRule,
    OperatorCall,
    Strategy,
    logical_shape,
)
from rankless.parallel.tensor_placement import BlockedShard, Placement, Shard

aten = torch.ops.aten


def take_blocks(placement: BlockedShard, start: int, length: int) -> Shard | BlockedShard | None:
    """Return the placement of a range of a dim of several blocks; None if it does not begin and end at their borders.

    Args:
        placement: The placement of the whole dim.
        start: The first row.
        length: The number of rows.
    """
    if length == 0 or start % placement.block or length % placement.block:
        return None
    return Shard(placement.dim, placement.lengths) if length == placement.block else placement


def split_block_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield the strategy of cutting a dim at the borders of its blocks."""
    placement = call.current_placements[0]
    dim = call.argument("dim") % len(logical_shape(call.inputs[0]))
    if not isinstance(placement, BlockedShard) or placement.dim != dim:
        return
    found: list[Placement] = []
    start = 0
    for shape in call.output_shapes:
        taken = take_blocks(placement, start, shape[dim])
        if taken is None:
            return
        found.append(taken)
        start += shape[dim]
    yield Strategy((placement,), tuple(found), make_split_lowering(tuple(found), dim))


def make_split_lowering(outputs: Sequence[Placement], dim: int) -> LoweringRule:
    """Return a lowering that cuts the rank's rows into those of the outputs."""

    def lower(builder: GraphBuilder, _call: OperatorCall, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> LocalValue:
        sizes = [builder.output_size(index)[dim] for index in range(len(outputs))]
        return builder.call(aten.split_with_sizes.default, args[0], sizes, dim)

    return lower


def slice_block_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield the strategy of taking a range of a dim that begins and ends at borders of its blocks."""
    placement, shape = call.current_placements[0], logical_shape(call.inputs[0])
    found = find_slice(call, shape)
    if not isinstance(placement, BlockedShard) or found is None or placement.dim != found[0]:
        return
    taken = take_blocks(placement, found[1], found[2])
    if taken is not None:
        yield Strategy((placement,), (taken,), lower_slice_of_blocks)


def find_slice(call: OperatorCall, shape: Sequence[int]) -> tuple[int, int, int] | None:
    """Return the dim, the first row and the number of rows of a slice of a value of this shape; None with a step."""
    dim = call.argument("dim") % len(shape)
    start, end, size = call.argument("start") or 0, call.argument("end"), shape[dim]
    if call.argument("step") != 1 or not all(isinstance(item, int) for item in (start, size)):
        return None
    end = size if end is None else min(end if end >= 0 else end + size, size)
    start = min(start if start >= 0 else start + size, size)
    return dim, start, max(0, end - start)


def lower_slice_of_blocks(
    builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], _kwargs: dict[str, Any]
) -> LocalValue:
    """Take the rank's rows of a range of blocks."""
    shape = logical_shape(call.inputs[0])
    dim, start, length = require_slice(call, shape)
    taken = builder.output_size(0)[dim]
    # The output has the same part of its rows as the input.
    first = start * taken // length
    return builder.call(aten.slice.Tensor, args[0], dim, first, first + taken)


def slice_backward_block_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield the strategy of the gradient of such a slice: zeros in the other blocks."""
    (shape,) = call.output_shapes
    placement, found = call.current_placements[0], find_slice(call, shape)
    if not isinstance(placement, Shard | BlockedShard) or found is None or placement.dim != found[0]:
        return
    whole = BlockedShard(found[0], placement.lengths)
    if whole.block == 0 or shape[found[0]] % whole.block or shape[found[0]] == whole.block:
        return
    if take_blocks(whole, found[1], found[2]) == placement:
        yield Strategy((placement,), (whole,), lower_slice_backward)


def lower_slice_backward(
    builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], _kwargs: dict[str, Any]
) -> LocalValue:
    """Put the rank's rows of a range among zeros: those of all rows, or those of some blocks."""
    (shape,), size = call.output_shapes, builder.output_size(0)
    dim = call.argument("dim") % len(shape)
    if any(isinstance(item, BlockedShard) and item.dim == dim for item in builder.output_sharding(0)):
        _, start, length = require_slice(call, shape)
        first, last = start * size[dim] // shape[dim], (start + length) * size[dim] // shape[dim]
        return builder.call(aten.slice_backward.default, args[0], size, dim, first, last, 1)
    return builder.call(aten.slice_backward.default, args[0], size, *args[2:])


def require_slice(call: OperatorCall, shape: Sequence[int]) -> tuple[int, int, int]:
    """Return the dim, the first row and the number of rows of a slice without a step."""
    found = find_slice(call, shape)
    assert found is not None, "a slice with a step has no blocks"
    return found


def join_block_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield the strategy of joining equal blocks, each divided alike, in a backward pass: the gradient of a split."""
    if not call.node.meta.get("backward") or not call.inputs:
        return
    shape, *others = [logical_shape(node) for node in call.inputs]
    if not shape or not others or any(other != shape for other in others):
        return
    dim = call.argument("dim") % len(shape)
    for placement in call.current_placements:
        if (
            isinstance(placement, Shard)
            and placement.dim == dim
            and all(type(item) is int for item in placement.lengths)
        ):
            yield Strategy((placement,) * len(call.inputs), (BlockedShard(dim, placement.lengths),))
            return


def carry_blocks(
    before: tuple[int, ...], after: tuple[int, ...], placement: BlockedShard, carry: Any
) -> Shard | BlockedShard | None:
    """Return the placement after a reshape of a dim of several blocks; None if there is none.

    Args:
        before: The shape before.
        after: The shape after.
        placement: The placement before.
        carry: Returns the placement after a reshape of a dim without blocks.
    """
    dim, block = placement.dim, placement.block
    taken_apart = (*before[:dim], before[dim] // block, block, *before[dim + 1 :])
    carried: Shard | None = carry(taken_apart, after, Shard(dim + 1, placement.lengths))
    return carried if carried is not None else merge_blocks(taken_apart, after, Shard(dim + 1, placement.lengths))


def merge_blocks(before: tuple[int, ...], after: tuple[int, ...], placement: Shard) -> BlockedShard | None:
    """Return the placement after a reshape that merges a divided dim with dims before it; None if there is none.

    Each index of the dims before it is a block.
    """
    if not all(type(item) is int for item in placement.lengths) or prod(before) == 0:
        return None
    leading, inner = prod(before[: placement.dim]), prod(before[placement.dim :])
    for dim in range(len(after)):
        outside, inside = prod(after[:dim]), prod(after[dim + 1 :])
        if leading % outside:
            return None
        blocks = leading // outside
        if blocks == 1 or after[dim] % blocks or (after[dim] // blocks) * inside != inner:
            continue
        row = prod(before[placement.dim + 1 :])
        if any(length * row % inside for length in placement.lengths):
            return None
        return BlockedShard(dim, tuple(length * row // inside for length in placement.lengths))
    return None

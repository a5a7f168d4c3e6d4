"""Rules for operators that only rearrange: views, slices, concatenation, padding, repetition.

Size arguments are those of the output, so a lowering replaces each by the size of the local output.
"""

from collections.abc import Iterator
from math import prod
from typing import Any

import torch

from rankless.compiler.rules.blocked_views import (
    carry_blocks,
    join_block_strategies,
    lower_slice_backward,
    merge_blocks,
    slice_backward_block_strategies,
    slice_block_strategies,
    split_block_strategies,
)
from rankless.compiler.rules.pattern import (
    LETTERS,
    is_partial_sum,
    make_letters,
    make_pattern_rule,
    partial_sum_strategies,
    split_strategies,
)
from rankless.compiler.rules.strategy import (
    GraphBuilder,
    LocalValue,
    OperatorCall,
    ShardingRule,
    Strategy,
    logical_shape,
)
from rankless.parallel.tensor_placement import BlockedShard, Shard

aten = torch.ops.aten

REORDERINGS = (
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
"""Operators that return a view of their one input, of any sharding, with other dims."""


def reshape_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield sharding on a dim that leads its group of merged or divided dims; the shard lengths change with it."""
    placement = call.current_placements[0]
    (shape,) = call.output_shapes
    before = logical_shape(call.inputs[0])
    carried: Shard | BlockedShard | None = None
    if isinstance(placement, Shard):
        carried = carry_shard(before, shape, placement)
        carried = carried or merge_blocks(before, shape, placement)
    elif isinstance(placement, BlockedShard):
        carried = carry_blocks(before, shape, placement, carry_shard)
    if carried is not None:
        yield Strategy((placement,), (carried,), lower_to_reshape)
    yield from partial_sum_strategies(call, (0,))


def carry_shard(before: tuple[int, ...], after: tuple[int, ...], placement: Shard) -> Shard | None:
    """Return the shard after a reshape, or None if the pieces would no longer be rows."""
    if prod(before) == 0:
        return None
    # A dim leads its group when the sizes before it multiply to the same number on both sides.
    leading = prod(before[: placement.dim])
    product, dim = 1, 0
    while dim < len(after) and (product < leading or after[dim] == 1):
        product *= after[dim]
        dim += 1
    if product != leading or dim == len(after):
        return None
    rows_before, rows_after = prod(before[placement.dim :]), after[dim]
    per_row = rows_before // rows_after
    inside = prod(before[placement.dim + 1 :])
    elements = [length * inside for length in placement.lengths]
    if any(count % per_row for count in elements):
        return None
    return Shard(dim, tuple(count // per_row for count in elements))


def permute_pattern(call: OperatorCall) -> str:
    """Return the pattern of an operator that reorders dims."""
    count = len(logical_shape(call.inputs[0]))
    text = make_letters(count)
    if call.operator is aten.t.default:
        order = list(range(count))[::-1]
    elif call.operator is aten.transpose.int:
        order = list(range(count))
        first, second = (call.argument(name) % max(count, 1) for name in ("dim0", "dim1"))
        if count:
            order[first], order[second] = order[second], order[first]
    else:
        order = [dim % count for dim in call.argument("dims")]
    return text + "->" + "".join(text[dim] for dim in order)


def unsqueeze_pattern(call: OperatorCall) -> str:
    """Return the pattern with a new dim of size one."""
    text = make_letters(len(logical_shape(call.inputs[0])))
    dim = call.argument("dim") % (len(text) + 1)
    return f"{text}->{text[:dim]}.{text[dim:]}"


def squeeze_pattern(call: OperatorCall) -> str:
    """Return the pattern without dims of size one."""
    shape = logical_shape(call.inputs[0])
    text = make_letters(len(shape))
    if call.operator is aten.squeeze.default:
        named_dims = list(range(len(shape)))
    else:
        dims = call.argument("dim")
        named_dims = [dim % len(shape) for dim in (dims if isinstance(dims, list | tuple) else [dims])] if shape else []
    removed = {dim for dim in named_dims if shape[dim] == 1}
    return text + "->" + "".join(letter for dim, letter in enumerate(text) if dim not in removed)


def select_pattern(call: OperatorCall) -> str:
    """Return the pattern of taking one index of a dim."""
    count = len(logical_shape(call.inputs[0]))
    dim = call.argument("dim") % count
    text = make_letters(count, [dim])
    return f"{text}->{text[:dim]}{text[dim + 1 :]}"


def slice_pattern(call: OperatorCall) -> str:
    """Return the pattern of taking a range of a dim; a range of all of it lets the dim be sharded."""
    shape = logical_shape(call.inputs[0])
    dim = call.argument("dim") % len(shape)
    replicated_dims = [] if call.output_shapes[0] == shape and not has_explicit_end(call, shape[dim]) else [dim]
    text = make_letters(len(shape), replicated_dims)
    return f"{text}->{text}"


def has_explicit_end(call: OperatorCall, size: int) -> bool:
    """Return whether a slice names an end that a longer dim would exceed and a shorter one might not reach."""
    end = call.argument("end")
    return (call.argument("start") or 0) != 0 or call.argument("step") != 1 or (end is not None and end < size)


def select_backward_pattern(call: OperatorCall) -> str:
    """Return the pattern of the gradient of `select`: zeros around the one index."""
    (shape,) = call.output_shapes
    dim = call.argument("dim") % len(shape)
    text = make_letters(len(shape), [dim])
    return f"{text[:dim]}{text[dim + 1 :]}->{text}"


def slice_backward_pattern(call: OperatorCall) -> str:
    """Return the pattern of the gradient of `slice`: zeros around the range."""
    (shape,) = call.output_shapes
    text = make_letters(len(shape), [call.argument("dim")])
    return f"{text}->{text}"


def expand_pattern(call: OperatorCall) -> str:
    """Return the pattern of broadcasting dims of size one and adding dims in front; the others can be sharded."""
    (shape,) = call.output_shapes
    sizes = logical_shape(call.inputs[0])
    offset = len(shape) - len(sizes)
    out = "".join(
        LETTERS[dim] if dim >= offset and sizes[dim - offset] == size and size != 1 else "."
        for dim, size in enumerate(shape)
    )
    return f"{out[offset:]}->{out}"


def repeat_pattern(call: OperatorCall) -> str:
    """Return the pattern of repetition; dims repeated once can be sharded."""
    (shape,) = call.output_shapes
    times = list(call.argument("repeats"))
    offset = len(shape) - len(logical_shape(call.inputs[0]))
    out = make_letters(len(shape), [dim for dim, count in enumerate(times) if count != 1 or dim < offset])
    return f"{out[offset:]}->{out}"


def pad_pattern(call: OperatorCall) -> str:
    """Return the pattern of padding; dims without padding can be sharded."""
    count = len(logical_shape(call.inputs[0]))
    pads = list(call.argument("pad"))
    padded_dims = [count - 1 - index // 2 for index, size in enumerate(pads) if size != 0]
    text = make_letters(count, padded_dims)
    return f"{text}->{text}"


def cat_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield sharding on all dims but the joined one.

    torch.cat ignores empty one-dimensional tensors among others, such as the empty cache of a transformer's layer.
    """
    (shape,) = call.output_shapes
    text = make_letters(len(shape), [call.argument("dim")])
    texts = [text if len(logical_shape(node)) == len(shape) else "*" for node in call.inputs]
    yield from split_strategies(call, ",".join(texts) + "->" + text)
    yield from join_block_strategies(call)
    if all(is_partial_sum(placement) for placement in call.current_placements):
        yield from partial_sum_strategies(call, tuple(range(len(call.inputs))))


def stack_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield sharding on the tensors' own dims, but not on the new dim."""
    text = make_letters(len(logical_shape(call.inputs[0])))
    dim = call.argument("dim") % (len(text) + 1)
    yield from split_strategies(call, ",".join([text] * len(call.inputs)) + f"->{text[:dim]}.{text[dim:]}")
    if all(is_partial_sum(placement) for placement in call.current_placements):
        yield from partial_sum_strategies(call, tuple(range(len(call.inputs))))


def unbind_pattern(call: OperatorCall) -> str:
    """Return the pattern of taking every index of a dim."""
    pattern = select_pattern(call)
    return pattern + ("," + pattern.split("->")[1]) * (len(call.output_shapes) - 1)


def chunk_pattern(call: OperatorCall) -> str:
    """Return the pattern of cutting a dim into pieces."""
    text = make_letters(len(logical_shape(call.inputs[0])), [call.argument("dim")])
    return text + "->" + ",".join([text] * len(call.output_shapes))


def diagonal_pattern(call: OperatorCall) -> str:
    """Return the pattern of a diagonal of two dims, which becomes the last dim."""
    count = len(logical_shape(call.inputs[0]))
    dims = [call.argument("dim1") % count, call.argument("dim2") % count]
    text = make_letters(count, dims)
    return f"{text}->{drop_dims(text, dims)}."


def around_diagonal_pattern(call: OperatorCall) -> str:
    """Return the pattern of matrices with the last dim as a diagonal, and zeros around it."""
    (shape,) = call.output_shapes
    dims = [call.argument("dim1") % len(shape), call.argument("dim2") % len(shape)]
    text = make_letters(len(shape), dims)
    return f"{drop_dims(text, dims)}.->{text}"


def diagonal_scatter_pattern(call: OperatorCall) -> str:
    """Return the pattern of writing a diagonal."""
    text, diagonal = diagonal_pattern(call).split("->")
    return f"{text},{diagonal}->{text}"


def drop_dims(text: str, dims: list[int]) -> str:
    """Return a text without the letters of some dims."""
    return "".join(letter for dim, letter in enumerate(text) if dim not in dims)


def select_scatter_pattern(call: OperatorCall) -> str:
    """Return the pattern of writing one index of a dim."""
    text, selected = select_pattern(call).split("->")
    return f"{text},{selected}->{text}"


def slice_scatter_pattern(call: OperatorCall) -> str:
    """Return the pattern of writing a range of a dim, which can be sharded if the range is all of it."""
    shape = logical_shape(call.inputs[0])
    is_whole = call.argument("step") == 1 and logical_shape(call.inputs[1]) == shape
    text = make_letters(len(shape), [] if is_whole else [call.argument("dim")])
    return f"{text},{text}->{text}"


def unfold_pattern(call: OperatorCall) -> str:
    """Return the pattern of windows along a dim; the places in a window become the last dim."""
    text = make_letters(len(logical_shape(call.inputs[0])), [call.argument("dimension")])
    return f"{text}->{text}."


def unfold_backward_pattern(call: OperatorCall) -> str:
    """Return the pattern of the gradient of `unfold`: a sum over windows."""
    text = make_letters(len(call.output_shapes[0]), [call.argument("dim")])
    return f"{text}.->{text}"


def channel_shuffle_pattern(call: OperatorCall) -> str:
    """Return the pattern of reordering channels (dim 1)."""
    text = make_letters(len(logical_shape(call.inputs[0])), [1])
    return f"{text}->{text}"


def view_as_real_pattern(call: OperatorCall) -> str:
    """Return the pattern of complex numbers as pairs in a new last dim."""
    text = make_letters(len(logical_shape(call.inputs[0])))
    return f"{text}->{text}."


def view_as_complex_pattern(call: OperatorCall) -> str:
    """Return the pattern of pairs in the last dim as complex numbers."""
    text = make_letters(len(call.output_shapes[0]))
    return f"{text}.->{text}"


def lower_view_as_complex(
    builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], _kwargs: dict[str, Any]
) -> LocalValue:
    """Lower to a view of contiguous memory, because a local piece may have strides of which there is no such view."""
    return builder.call(call.operator, builder.call(aten.contiguous.default, args[0]))


def same_dims_pattern(call: OperatorCall) -> str:
    """Return the pattern of an operator that keeps all dims."""
    text = make_letters(len(logical_shape(call.inputs[0])))
    return f"{text}->{text}"


def lower_lazy_view(
    builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], _kwargs: dict[str, Any]
) -> LocalValue:
    """Compute a conjugate or a negative in memory: a collective sends memory, and would lose a mark on the tensor."""
    return builder.call(
        aten.conj_physical.default if call.operator is aten._conj.default else aten.neg.default, args[0]
    )


def make_size_lowering(argument: int) -> Any:
    """Return a lowering that replaces the size list at a position by the size of the local output."""

    def lower(builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LocalValue:
        local = list(args)
        local[argument] = builder.output_size(0)
        return builder.call(call.operator, *local, **kwargs)

    return lower


def lower_to_reshape(
    builder: GraphBuilder, _call: OperatorCall, args: tuple[Any, ...], _kwargs: dict[str, Any]
) -> LocalValue:
    """Lower to a reshape to the size of the local output.

    A local piece may have strides of which there is no such view. A squeeze would remove the dim of a single row too.
    """
    return builder.call(aten.reshape.default, args[0], builder.output_size(0))


def join_rules(*rules: ShardingRule) -> ShardingRule:
    """Return a rule with the strategies of several."""

    def strategies(call: OperatorCall) -> Iterator[Strategy]:
        for rule in rules:
            yield from rule(call)

    return strategies


RULES: dict[Any, ShardingRule] = {
    aten.view.default: reshape_strategies,
    aten._unsafe_view.default: reshape_strategies,
    aten.t.default: make_pattern_rule(permute_pattern, (0,)),
    aten.transpose.int: make_pattern_rule(permute_pattern, (0,)),
    aten.permute.default: make_pattern_rule(permute_pattern, (0,)),
    aten.unsqueeze.default: make_pattern_rule(unsqueeze_pattern, (0,)),
    aten.squeeze.default: make_pattern_rule(squeeze_pattern, (0,), lower=lower_to_reshape),
    aten.squeeze.dim: make_pattern_rule(squeeze_pattern, (0,), lower=lower_to_reshape),
    aten.squeeze.dims: make_pattern_rule(squeeze_pattern, (0,), lower=lower_to_reshape),
    aten.select.int: make_pattern_rule(select_pattern, (0,)),
    aten.slice.Tensor: join_rules(make_pattern_rule(slice_pattern, (0,)), slice_block_strategies),
    aten.select_backward.default: make_pattern_rule(select_backward_pattern, (0,), lower=make_size_lowering(1)),
    aten.slice_backward.default: join_rules(
        make_pattern_rule(slice_backward_pattern, (0,), lower=lower_slice_backward), slice_backward_block_strategies
    ),
    aten.diagonal.default: make_pattern_rule(diagonal_pattern, (0,)),
    aten.diagonal_backward.default: make_pattern_rule(around_diagonal_pattern, (0,), lower=make_size_lowering(1)),
    aten.diagonal_scatter.default: make_pattern_rule(diagonal_scatter_pattern, (0, 1)),
    aten.diag_embed.default: make_pattern_rule(around_diagonal_pattern, (0,)),
    aten.select_scatter.default: make_pattern_rule(select_scatter_pattern, (0, 1)),
    aten.slice_scatter.default: make_pattern_rule(slice_scatter_pattern, (0, 1)),
    aten.unfold.default: make_pattern_rule(unfold_pattern, (0,)),
    aten.unfold_backward.default: make_pattern_rule(unfold_backward_pattern, (0,), lower=make_size_lowering(1)),
    aten.channel_shuffle.default: make_pattern_rule(channel_shuffle_pattern, (0,)),
    aten.native_channel_shuffle.default: make_pattern_rule(channel_shuffle_pattern, (0,)),
    aten.view_as_real.default: make_pattern_rule(view_as_real_pattern),
    aten.view_as_complex.default: make_pattern_rule(view_as_complex_pattern, lower=lower_view_as_complex),
    aten._conj.default: make_pattern_rule(same_dims_pattern, lower=lower_lazy_view),
    aten._neg_view.default: make_pattern_rule(same_dims_pattern, lower=lower_lazy_view),
    aten.expand.default: make_pattern_rule(expand_pattern, (0,), lower=make_size_lowering(1)),
    aten.repeat.default: make_pattern_rule(repeat_pattern, (0,)),
    aten.constant_pad_nd.default: make_pattern_rule(pad_pattern),
    aten.cat.default: cat_strategies,
    aten.stack.default: stack_strategies,
    aten.unbind.int: make_pattern_rule(unbind_pattern, (0,)),
    **dict.fromkeys(
        (
            aten.split.Tensor,
            aten.split_with_sizes.default,
            aten.unsafe_split.Tensor,
            aten.unsafe_split_with_sizes.default,
        ),
        join_rules(make_pattern_rule(chunk_pattern, (0,)), split_block_strategies),
    ),
}

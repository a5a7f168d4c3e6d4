"""Operators that only rearrange: views, slices, concatenation, padding, repetition.

Size arguments are the output's: each is replaced by the size of the local output (facts: engine.md, "Lowering").
"""

from collections.abc import Iterator
from math import prod
from typing import Any

import torch

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
    compute_local_shape,
    logical_shape,
)
from rankless.parallel.placement import Placement, Shard

aten = torch.ops.aten


def reshape_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """A view splits on a dim that leads its group of merged or divided dims; shard lengths change with it."""
    placement = call.current_placements[0]
    (shape,) = call.output_shapes
    if isinstance(placement, Shard):
        found = carry_shard(logical_shape(call.inputs[0]), shape, placement)
        if found is not None:
            yield Strategy((placement,), (found,), make_reshape_lowering(shape, found))
    yield from partial_sum_strategies(call, (0,))


def carry_shard(before: tuple[int, ...], after: tuple[int, ...], placement: Shard) -> Shard | None:
    """Where a split dim lies after a reshape, or None if the pieces would not be rows any more."""
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


def make_reshape_lowering(shape: tuple[int, ...], placement: Placement) -> Any:
    """Lower a view to a reshape of the local size, for a local piece need not lie in memory as the whole does."""

    def lower(builder: GraphBuilder, _call: OperatorCall, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> LocalValue:
        return builder.call(aten.reshape.default, args[0], compute_local_shape(shape, placement, builder.rank))

    return lower


def permute_pattern(call: OperatorCall) -> str:
    """Dims change places."""
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
    """A dim of size one appears."""
    text = make_letters(len(logical_shape(call.inputs[0])))
    dim = call.argument("dim") % (len(text) + 1)
    return f"{text}->{text[:dim]}.{text[dim:]}"


def squeeze_pattern(call: OperatorCall) -> str:
    """Dims of size one disappear."""
    shape = logical_shape(call.inputs[0])
    text = make_letters(len(shape))
    if call.operator is aten.squeeze.default:
        named = list(range(len(shape)))
    else:
        dims = call.argument("dim")
        named = [dim % len(shape) for dim in (dims if isinstance(dims, list | tuple) else [dims])] if shape else []
    gone = {dim for dim in named if shape[dim] == 1}
    return text + "->" + "".join(letter for dim, letter in enumerate(text) if dim not in gone)


def select_pattern(call: OperatorCall) -> str:
    """One index of a dim is taken."""
    count = len(logical_shape(call.inputs[0]))
    dim = call.argument("dim") % count
    text = make_letters(count, [dim])
    return f"{text}->{text[:dim]}{text[dim + 1 :]}"


def slice_pattern(call: OperatorCall) -> str:
    """A range of a dim is taken; a range of all of it leaves the dim free to be split."""
    shape = logical_shape(call.inputs[0])
    dim = call.argument("dim") % len(shape)
    whole = [] if call.output_shapes[0] == shape and not has_explicit_end(call, shape[dim]) else [dim]
    text = make_letters(len(shape), whole)
    return f"{text}->{text}"


def has_explicit_end(call: OperatorCall, size: int) -> bool:
    """Whether a slice names an end that a longer dim would not reach (and so a shorter one might)."""
    end = call.argument("end")
    return (call.argument("start") or 0) != 0 or call.argument("step") != 1 or (end is not None and end < size)


def select_backward_pattern(call: OperatorCall) -> str:
    """The gradient of `select`: a dim of zeros appears around the one index."""
    (shape,) = call.output_shapes
    dim = call.argument("dim") % len(shape)
    text = make_letters(len(shape), [dim])
    return f"{text[:dim]}{text[dim + 1 :]}->{text}"


def slice_backward_pattern(call: OperatorCall) -> str:
    """The gradient of `slice`: zeros around the range."""
    (shape,) = call.output_shapes
    text = make_letters(len(shape), [call.argument("dim")])
    return f"{text}->{text}"


def expand_pattern(call: OperatorCall) -> str:
    """Dims of size one, or new ones in front, are stretched; the others may be split."""
    (shape,) = call.output_shapes
    sizes = logical_shape(call.inputs[0])
    offset = len(shape) - len(sizes)
    out = "".join(
        LETTERS[dim] if dim >= offset and sizes[dim - offset] == size and size != 1 else "."
        for dim, size in enumerate(shape)
    )
    return f"{out[offset:]}->{out}"


def repeat_pattern(call: OperatorCall) -> str:
    """Dims repeated once may be split."""
    (shape,) = call.output_shapes
    times = list(call.argument("repeats"))
    offset = len(shape) - len(logical_shape(call.inputs[0]))
    out = make_letters(len(shape), [dim for dim, count in enumerate(times) if count != 1 or dim < offset])
    return f"{out[offset:]}->{out}"


def pad_pattern(call: OperatorCall) -> str:
    """Dims that get no padding may be split."""
    count = len(logical_shape(call.inputs[0]))
    pads = list(call.argument("pad"))
    touched = [count - 1 - index // 2 for index, size in enumerate(pads) if size != 0]
    text = make_letters(count, touched)
    return f"{text}->{text}"


def cat_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """All dims but the joined one may be split."""
    (shape,) = call.output_shapes
    # torch.cat takes empty one-dimensional tensors among others; those cases are gathered.
    if any(len(logical_shape(node)) != len(shape) for node in call.inputs):
        return
    text = make_letters(len(shape), [call.argument("dim")])
    yield from split_strategies(call, ",".join([text] * len(call.inputs)) + "->" + text)
    if all(is_partial_sum(placement) for placement in call.current_placements):
        yield from partial_sum_strategies(call, tuple(range(len(call.inputs))))


def stack_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """A new dim joins equal tensors; their own dims may be split."""
    text = make_letters(len(logical_shape(call.inputs[0])))
    dim = call.argument("dim") % (len(text) + 1)
    yield from split_strategies(call, ",".join([text] * len(call.inputs)) + f"->{text[:dim]}.{text[dim:]}")
    if all(is_partial_sum(placement) for placement in call.current_placements):
        yield from partial_sum_strategies(call, tuple(range(len(call.inputs))))


def unbind_pattern(call: OperatorCall) -> str:
    """Every index of a dim is taken."""
    one = select_pattern(call)
    return one + ("," + one.split("->")[1]) * (len(call.output_shapes) - 1)


def chunk_pattern(call: OperatorCall) -> str:
    """A dim is cut into pieces."""
    text = make_letters(len(logical_shape(call.inputs[0])), [call.argument("dim")])
    return text + "->" + ",".join([text] * len(call.output_shapes))


def make_size_lowering(argument: int) -> Any:
    """Lower with the size list at a position replaced by the size of the local output."""

    def lower(builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LocalValue:
        local = list(args)
        local[argument] = builder.output_size(0)
        return builder.call(call.operator, *local, **kwargs)

    return lower


def lower_to_reshape(
    builder: GraphBuilder, _call: OperatorCall, args: tuple[Any, ...], _kwargs: dict[str, Any]
) -> LocalValue:
    """Lower a squeeze to a reshape, for a piece of one row would lose its dim of rows too."""
    return builder.call(aten.reshape.default, args[0], builder.output_size(0))


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
    aten.slice.Tensor: make_pattern_rule(slice_pattern, (0,)),
    aten.select_backward.default: make_pattern_rule(select_backward_pattern, (0,), lower=make_size_lowering(1)),
    aten.slice_backward.default: make_pattern_rule(slice_backward_pattern, (0,), lower=make_size_lowering(1)),
    aten.expand.default: make_pattern_rule(expand_pattern, (0,), lower=make_size_lowering(1)),
    aten.repeat.default: make_pattern_rule(repeat_pattern, (0,)),
    aten.constant_pad_nd.default: make_pattern_rule(pad_pattern),
    aten.cat.default: cat_strategies,
    aten.stack.default: stack_strategies,
    aten.unbind.int: make_pattern_rule(unbind_pattern, (0,)),
    aten.split.Tensor: make_pattern_rule(chunk_pattern, (0,)),
    aten.split_with_sizes.default: make_pattern_rule(chunk_pattern, (0,)),
}

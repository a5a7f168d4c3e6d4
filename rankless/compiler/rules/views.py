"""Operators that only rearrange: views, slices, concatenation, padding, repetition.

Size arguments are the output's: each is replaced by the size of the local output (facts: engine.md, "Lowering").
"""

from collections.abc import Iterator
from math import prod
from typing import Any

import torch

from rankless.compiler.rules.pattern import LETTERS, by_pattern, is_sum, letters, split, sums
from rankless.compiler.rules.strategy import Call, Emit, Local, Rule, Strategy, local_shape, shape_of
from rankless.parallel.placement import Placement, Shard

aten = torch.ops.aten


def reshaped(call: Call) -> Iterator[Strategy]:
    """A view splits on a dim that leads its group of merged or divided dims; shard lengths change with it."""
    placement = call.current[0]
    (shape,) = call.output_shapes
    if isinstance(placement, Shard):
        found = carried(shape_of(call.inputs[0]), shape, placement)
        if found is not None:
            yield Strategy((placement,), (found,), reshape_to(shape, found))
    yield from sums(call, (0,))


def carried(before: tuple[int, ...], after: tuple[int, ...], placement: Shard) -> Shard | None:
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


def reshape_to(shape: tuple[int, ...], placement: Placement) -> Any:
    """Lower a view to a reshape of the local size, for a local piece need not lie in memory as the whole does."""

    def lower(emit: Emit, _call: Call, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Local:
        return emit.call(aten.reshape.default, args[0], local_shape(shape, placement, emit.rank))

    return lower


def permuted(call: Call) -> str:
    """Dims change places."""
    count = len(shape_of(call.inputs[0]))
    text = letters(count)
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


def unsqueezed(call: Call) -> str:
    """A dim of size one appears."""
    text = letters(len(shape_of(call.inputs[0])))
    dim = call.argument("dim") % (len(text) + 1)
    return f"{text}->{text[:dim]}.{text[dim:]}"


def squeezed(call: Call) -> str:
    """Dims of size one disappear."""
    shape = shape_of(call.inputs[0])
    text = letters(len(shape))
    if call.operator is aten.squeeze.default:
        named = list(range(len(shape)))
    else:
        dims = call.argument("dim")
        named = [dim % len(shape) for dim in (dims if isinstance(dims, list | tuple) else [dims])] if shape else []
    gone = {dim for dim in named if shape[dim] == 1}
    return text + "->" + "".join(letter for dim, letter in enumerate(text) if dim not in gone)


def selected(call: Call) -> str:
    """One index of a dim is taken."""
    count = len(shape_of(call.inputs[0]))
    dim = call.argument("dim") % count
    text = letters(count, [dim])
    return f"{text}->{text[:dim]}{text[dim + 1 :]}"


def sliced(call: Call) -> str:
    """A range of a dim is taken; a range of all of it leaves the dim free to be split."""
    shape = shape_of(call.inputs[0])
    dim = call.argument("dim") % len(shape)
    whole = [] if call.output_shapes[0] == shape and not is_explicit_end(call, shape[dim]) else [dim]
    text = letters(len(shape), whole)
    return f"{text}->{text}"


def is_explicit_end(call: Call, size: int) -> bool:
    """Whether a slice names an end that a longer dim would not reach (and so a shorter one might)."""
    end = call.argument("end")
    return (call.argument("start") or 0) != 0 or call.argument("step") != 1 or (end is not None and end < size)


def selected_back(call: Call) -> str:
    """The gradient of `select`: a dim of zeros appears around the one index."""
    (shape,) = call.output_shapes
    dim = call.argument("dim") % len(shape)
    text = letters(len(shape), [dim])
    return f"{text[:dim]}{text[dim + 1 :]}->{text}"


def sliced_back(call: Call) -> str:
    """The gradient of `slice`: zeros around the range."""
    (shape,) = call.output_shapes
    text = letters(len(shape), [call.argument("dim")])
    return f"{text}->{text}"


def expanded(call: Call) -> str:
    """Dims of size one, or new ones in front, are stretched; the others may be split."""
    (shape,) = call.output_shapes
    sizes = shape_of(call.inputs[0])
    offset = len(shape) - len(sizes)
    out = "".join(
        LETTERS[dim] if dim >= offset and sizes[dim - offset] == size and size != 1 else "."
        for dim, size in enumerate(shape)
    )
    return f"{out[offset:]}->{out}"


def repeated(call: Call) -> str:
    """Dims repeated once may be split."""
    (shape,) = call.output_shapes
    times = list(call.argument("repeats"))
    offset = len(shape) - len(shape_of(call.inputs[0]))
    out = letters(len(shape), [dim for dim, count in enumerate(times) if count != 1 or dim < offset])
    return f"{out[offset:]}->{out}"


def padded(call: Call) -> str:
    """Dims that get no padding may be split."""
    count = len(shape_of(call.inputs[0]))
    pads = list(call.argument("pad"))
    touched = [count - 1 - index // 2 for index, size in enumerate(pads) if size != 0]
    text = letters(count, touched)
    return f"{text}->{text}"


def concatenated(call: Call) -> Iterator[Strategy]:
    """All dims but the joined one may be split."""
    (shape,) = call.output_shapes
    # torch.cat takes empty one-dimensional tensors among others; those cases are gathered.
    if any(len(shape_of(node)) != len(shape) for node in call.inputs):
        return
    text = letters(len(shape), [call.argument("dim")])
    yield from split(call, ",".join([text] * len(call.inputs)) + "->" + text)
    if all(is_sum(placement) for placement in call.current):
        yield from sums(call, tuple(range(len(call.inputs))))


def stacked(call: Call) -> Iterator[Strategy]:
    """A new dim joins equal tensors; their own dims may be split."""
    text = letters(len(shape_of(call.inputs[0])))
    dim = call.argument("dim") % (len(text) + 1)
    yield from split(call, ",".join([text] * len(call.inputs)) + f"->{text[:dim]}.{text[dim:]}")
    if all(is_sum(placement) for placement in call.current):
        yield from sums(call, tuple(range(len(call.inputs))))


def unbound(call: Call) -> str:
    """Every index of a dim is taken."""
    one = selected(call)
    return one + ("," + one.split("->")[1]) * (len(call.output_shapes) - 1)


def parted(call: Call) -> str:
    """A dim is cut into pieces."""
    text = letters(len(shape_of(call.inputs[0])), [call.argument("dim")])
    return text + "->" + ",".join([text] * len(call.output_shapes))


def sizes_in(argument: int) -> Any:
    """Lower with the size list at a position replaced by the size of the local output."""

    def lower(emit: Emit, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Local:
        local = list(args)
        local[argument] = emit.output_size(0)
        return emit.call(call.operator, *local, **kwargs)

    return lower


def reshape_to_output(emit: Emit, _call: Call, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Local:
    """Lower a squeeze to a reshape, for a piece of one row would lose its dim of rows too."""
    return emit.call(aten.reshape.default, args[0], emit.output_size(0))


RULES: dict[Any, Rule] = {
    aten.view.default: reshaped,
    aten._unsafe_view.default: reshaped,
    aten.t.default: by_pattern(permuted, (0,)),
    aten.transpose.int: by_pattern(permuted, (0,)),
    aten.permute.default: by_pattern(permuted, (0,)),
    aten.unsqueeze.default: by_pattern(unsqueezed, (0,)),
    aten.squeeze.default: by_pattern(squeezed, (0,), lower=reshape_to_output),
    aten.squeeze.dim: by_pattern(squeezed, (0,), lower=reshape_to_output),
    aten.squeeze.dims: by_pattern(squeezed, (0,), lower=reshape_to_output),
    aten.select.int: by_pattern(selected, (0,)),
    aten.slice.Tensor: by_pattern(sliced, (0,)),
    aten.select_backward.default: by_pattern(selected_back, (0,), lower=sizes_in(1)),
    aten.slice_backward.default: by_pattern(sliced_back, (0,), lower=sizes_in(1)),
    aten.expand.default: by_pattern(expanded, (0,), lower=sizes_in(1)),
    aten.repeat.default: by_pattern(repeated, (0,)),
    aten.constant_pad_nd.default: by_pattern(padded),
    aten.cat.default: concatenated,
    aten.stack.default: stacked,
    aten.unbind.int: by_pattern(unbound, (0,)),
    aten.split.Tensor: by_pattern(parted, (0,)),
    aten.split_with_sizes.default: by_pattern(parted, (0,)),
}

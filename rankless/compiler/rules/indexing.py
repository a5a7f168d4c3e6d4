"""Reading and writing by index."""

from collections.abc import Iterator
from typing import Any

import torch

from rankless.compiler.rules.pattern import LETTERS, by_pattern, letters, split
from rankless.compiler.rules.strategy import Call, Rule, Strategy, shape_of
from rankless.parallel.placement import Partial, Placement, Replicate, Shard

aten = torch.ops.aten


def along_dim(call: Call) -> str:
    """gather and scatter: dims other than the indexed one may be split where index and values have equal sizes."""
    shapes = [shape_of(node) for node in call.inputs]
    count = len(shapes[0])
    whole = [call.argument("dim")]
    whole += [dim for dim in range(count) if any(shape[dim] != shapes[0][dim] for shape in shapes)]
    text = letters(count, whole)
    return ",".join([text] * len(call.inputs)) + "->" + text


def gathered(call: Call) -> Iterator[Strategy]:
    """One pattern for all tensors of the call, if they have as many dims."""
    if len({len(shape_of(node)) for node in call.inputs}) == 1 and call.output_shapes[0]:
        yield from split(call, along_dim(call))


def gather(call: Call) -> Iterator[Strategy]:
    """As above; besides, the indices may be split along the indexed dim, which then must be whole in the source."""
    yield from gathered(call)
    shapes = [shape_of(node) for node in call.inputs]
    if len(shapes[0]) == len(shapes[1]) and shapes[1]:
        dim = call.argument("dim") % len(shapes[0])
        source = "." * len(shapes[0])
        indices = "".join("Z" if place == dim else "." for place in range(len(shapes[1])))
        yield from split(call, f"{source},{indices}->{indices}")


def index_select(call: Call) -> str:
    """Rows by index: other dims of the source, or the list of indices, may be split."""
    count = len(shape_of(call.inputs[0]))
    dim = call.argument("dim") % count
    source = letters(count, [dim])
    return f"{source},Z->{source[:dim]}Z{source[dim + 1 :]}"


def indexed(call: Call) -> tuple[str, list[str], str] | None:
    """Patterns of source, of each index tensor and of the values of an advanced indexing; None if too intricate."""
    indices = call.argument("indices")
    positions = [place for place, index in enumerate(indices) if index is not None]
    if positions != list(range(positions[0], positions[-1] + 1)):
        return None
    shapes = [shape_of(indices[place]) for place in positions]
    if any(indices[place].meta["val"].dtype in (torch.bool, torch.uint8) for place in positions):
        return None
    broadcast = torch.broadcast_shapes(*shapes)
    first = positions[0]
    count = len(shape_of(call.inputs[0]))
    source = letters(count, positions)
    chosen = "".join("." if size == 1 else LETTERS[-1 - dim] for dim, size in enumerate(broadcast))
    texts = []
    for shape in shapes:
        aligned = chosen[len(chosen) - len(shape) :]
        texts.append("".join("." if size == 1 else text for text, size in zip(aligned, shape, strict=True)))
    return source, texts, source[:first] + chosen + source[first + len(positions) :]


def index(call: Call) -> Iterator[Strategy]:
    """source[indices]."""
    found = indexed(call)
    if found is not None:
        source, texts, values = found
        yield from split(call, ",".join([source, *texts]) + "->" + values)


def index_put(call: Call) -> Iterator[Strategy]:
    """source with values added at indices: each rank adds its own values, to a partial sum."""
    found = indexed(call)
    values = call.inputs[-1]
    if found is None or not call.argument("accumulate"):
        return
    source, texts, text = found
    if len(shape_of(values)) != len(text):
        return
    inputs = [source, *texts, text]
    for position, placement in enumerate(call.current):
        if position == 0 or not isinstance(placement, Shard):
            continue
        letter = inputs[position][placement.dim]
        if letter == "." or letter in source:
            continue
        placements: list[Placement] = [Partial()]
        for other in inputs[1:]:
            placements.append(Shard(other.index(letter), placement.lengths) if letter in other else Replicate())
        yield Strategy(tuple(placements), (Partial(),))


RULES: dict[Any, Rule] = {
    aten.gather.default: gather,
    aten.scatter.src: gathered,
    aten.scatter.value: gathered,
    aten.scatter_add.default: gathered,
    aten.index_select.default: by_pattern(index_select),
    aten.index.Tensor: index,
    aten.index_put.default: index_put,
    aten._unsafe_index.Tensor: index,
    aten._unsafe_index_put.default: index_put,
}

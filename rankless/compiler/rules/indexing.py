"""Rules for reading and writing by index."""

from collections.abc import Iterator
from typing import Any

import torch

from rankless.compiler.rules.pattern import LETTERS, make_letters, make_pattern_rule, split_strategies
from rankless.compiler.rules.strategy import OperatorCall, ShardingRule, Strategy, logical_shape
from rankless.parallel.tensor_placement import Partial, Placement, Replicate, Shard

aten = torch.ops.aten


def along_dim_pattern(call: OperatorCall) -> str:
    """Return the pattern of gather and scatter: other dims can be sharded where index and values have equal sizes."""
    shapes = [logical_shape(node) for node in call.inputs]
    count = len(shapes[0])
    replicated_dims = [call.argument("dim")]
    replicated_dims += [dim for dim in range(count) if any(shape[dim] != shapes[0][dim] for shape in shapes)]
    text = make_letters(count, replicated_dims)
    return ",".join([text] * len(call.inputs)) + "->" + text


def along_dim_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies with one pattern for all tensors of the call, if they have equally many dims."""
    if len({len(logical_shape(node)) for node in call.inputs}) == 1 and call.output_shapes[0]:
        yield from split_strategies(call, along_dim_pattern(call))


def gather_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield the same, and sharding of the indices along the indexed dim, with that dim replicated in the source."""
    yield from along_dim_strategies(call)
    shapes = [logical_shape(node) for node in call.inputs]
    if len(shapes[0]) == len(shapes[1]) and shapes[1]:
        dim = call.argument("dim") % len(shapes[0])
        source = "." * len(shapes[0])
        indices = "".join("Z" if position == dim else "." for position in range(len(shapes[1])))
        yield from split_strategies(call, f"{source},{indices}->{indices}")


def index_select_pattern(call: OperatorCall) -> str:
    """Return the pattern of rows by index: other dims of the source, or the list of indices, can be sharded."""
    count = len(logical_shape(call.inputs[0]))
    dim = call.argument("dim") % count
    source = make_letters(count, [dim])
    return f"{source},Z->{source[:dim]}Z{source[dim + 1 :]}"


def make_index_patterns(call: OperatorCall) -> tuple[str, list[str], str] | None:
    """Return the patterns of source, of each index tensor and of the values; None for unsupported indexing."""
    indices = call.argument("indices")
    positions = [position for position, index in enumerate(indices) if index is not None]
    if positions != list(range(positions[0], positions[-1] + 1)):
        return None
    shapes = [logical_shape(indices[position]) for position in positions]
    if any(indices[position].meta["val"].dtype in (torch.bool, torch.uint8) for position in positions):
        return None
    broadcast = torch.broadcast_shapes(*shapes)
    first = positions[0]
    count = len(logical_shape(call.inputs[0]))
    source = make_letters(count, positions)
    chosen = "".join("." if size == 1 else LETTERS[-1 - dim] for dim, size in enumerate(broadcast))
    texts = []
    for shape in shapes:
        aligned = chosen[len(chosen) - len(shape) :]
        texts.append("".join("." if size == 1 else text for text, size in zip(aligned, shape, strict=True)))
    return source, texts, source[:first] + chosen + source[first + len(positions) :]


def index_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of `source[indices]`."""
    patterns = make_index_patterns(call)
    if patterns is not None:
        source, texts, values = patterns
        yield from split_strategies(call, ",".join([source, *texts]) + "->" + values)


def index_put_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of adding values at indices: each rank adds its own values to a partial sum."""
    patterns = make_index_patterns(call)
    values = call.inputs[-1]
    if patterns is None or not call.argument("accumulate"):
        return
    source, texts, text = patterns
    if len(logical_shape(values)) != len(text):
        return
    inputs = [source, *texts, text]
    for position, placement in enumerate(call.current_placements):
        if position == 0 or not isinstance(placement, Shard):
            continue
        letter = inputs[position][placement.dim]
        if letter == "." or letter in source:
            continue
        placements: list[Placement] = [Partial()]
        for other in inputs[1:]:
            placements.append(Shard(other.index(letter), placement.lengths) if letter in other else Replicate())
        yield Strategy(tuple(placements), (Partial(),))


RULES: dict[Any, ShardingRule] = {
    aten.gather.default: gather_strategies,
    aten.scatter.src: along_dim_strategies,
    aten.scatter.value: along_dim_strategies,
    aten.scatter_add.default: along_dim_strategies,
    aten.index_select.default: make_pattern_rule(index_select_pattern),
    aten.index.Tensor: index_strategies,
    aten.index_put.default: index_put_strategies,
    aten._unsafe_index.Tensor: index_strategies,
    aten._unsafe_index_put.default: index_put_strategies,
}

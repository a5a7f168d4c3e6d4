"""Rules for reading and writing by index."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from rankless.compiler.rules.half_precision import ACCUMULATED_IN
from rankless.compiler.rules.pattern import LETTERS, make_letters, make_pattern_rule, make_placement, split_strategies
from rankless.compiler.rules.strategy import (
    GraphBuilder,
    LocalValue,
    LoweringRule,
    OperatorCall,
    ShardingRule,
    Strategy,
    logical_shape,
)
from rankless.compiler.tracing.symbolic_sizes import list_traced_counts
from rankless.parallel.tensor_placement import Partial, Replicate, Shard

aten = torch.ops.aten

RANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)
COPIES = (aten._to_copy.default, aten.clone.default, aten.alias.default, aten.lift_fresh_copy.default)
VIEWS = (aten.view.default, aten._unsafe_view.default)


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


def index_select_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield sharding of other dims of the source, or of the list of indices."""
    count = len(logical_shape(call.inputs[0]))
    dim = call.argument("dim") % count
    source = make_letters(count, [dim])
    yield from split_strategies(call, f"{source},Z->{source[:dim]}Z{source[dim + 1 :]}")


@dataclass(frozen=True)
class IndexPatterns:
    """The patterns of `source[indices]`: of the source, of each index tensor, and of the values.

    `positions` are the indexed dims of the source.
    """

    positions: tuple[int, ...]
    source: str
    indices: tuple[str, ...]
    values: str


def make_index_patterns(call: OperatorCall) -> IndexPatterns | None:
    """Return the patterns of an indexing; None for a mask.

    The dims of the index tensors take the place of the indexed dims, or come first if those do not lie side by side.
    """
    indices = call.argument("indices")
    positions = [position for position, index in enumerate(indices) if index is not None]
    shapes = [logical_shape(indices[position]) for position in positions]
    if any(indices[position].meta["val"].dtype in (torch.bool, torch.uint8) for position in positions):
        return None
    broadcast = torch.broadcast_shapes(*shapes)
    side_by_side = positions == list(range(positions[0], positions[-1] + 1))
    first = positions[0] if side_by_side else 0
    source = make_letters(len(logical_shape(call.inputs[0])), positions)
    chosen = "".join("." if size == 1 else LETTERS[-1 - dim] for dim, size in enumerate(broadcast))
    kept = "".join(letter for dim, letter in enumerate(source) if dim not in positions)
    return IndexPatterns(
        positions=tuple(positions),
        source=source,
        indices=tuple(align_letters(chosen, shape) for shape in shapes),
        values=kept[:first] + chosen + kept[first:],
    )


def align_letters(text: str, shape: tuple[int, ...]) -> str:
    """Return the letters of a shape that broadcasts to that of `text`."""
    aligned = text[len(text) - len(shape) :]
    return "".join("." if size == 1 else letter for letter, size in zip(aligned, shape, strict=True))


def make_values_pattern(call: OperatorCall, patterns: IndexPatterns) -> str:
    """Return the pattern of the values that a call writes or adds."""
    return align_letters(patterns.values, logical_shape(call.inputs[-1]))


def index_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of `source[indices]`."""
    patterns = make_index_patterns(call)
    if patterns is not None:
        yield from split_strategies(call, ",".join([patterns.source, *patterns.indices]) + "->" + patterns.values)
        yield from aligned_strategies(call, patterns, patterns.values)


# Note [aligned indices]: `x[torch.arange(n), y]` reads row i by entry i of the indices. With the rows and the entries
# split alike, each rank reads its own rows only, by places that count from its first row. The program must say that the
# index is a range; an index that only happens to hold one is not split.


def find_range_dim(node: fx.Node) -> int | None:
    """Return the dim along which a value counts from zero, equal along all other dims; None for any other value.

    The dim has more than one entry. Each value is known from the program, not from numbers.
    """
    value = node.meta["val"]
    if value.dtype not in (torch.int32, torch.int64):
        return None
    if node.target in RANGES:
        return 0 if is_from_zero_by_one(node) and value.shape[0] != 1 else None
    if node.op != "call_function" or not node.all_input_nodes:
        return None
    source = node.all_input_nodes[0]
    if node.target in COPIES:
        return find_range_dim(source)
    if node.target is aten.expand.default:
        dim = find_range_dim(source)
        return None if dim is None else dim + len(value.shape) - len(source.meta["val"].shape)
    if node.target is aten.unsqueeze.default:
        dim, added = find_range_dim(source), int(str(node.args[1])) % len(value.shape)
        return None if dim is None else dim + (added <= dim)
    if node.target in VIEWS:
        return find_viewed_dim(source, value.shape)
    return None


def is_from_zero_by_one(node: fx.Node) -> bool:
    """Return whether an `arange` starts at zero and counts by one."""
    if node.target is aten.arange.default:
        return True
    start, step = node.args[0], node.args[2] if len(node.args) > 2 else node.kwargs.get("step", 1)
    return isinstance(start, int) and isinstance(step, int) and (start, step) == (0, 1)


def find_viewed_dim(source: fx.Node, shape: Any) -> int | None:
    """Return the dim of a range after a view that only adds or drops dims of size one."""
    dim = find_range_dim(source)
    before = source.meta["val"].shape
    if dim is None or any(size != 1 for place, size in enumerate(before) if place != dim):
        return None
    long_dims = [place for place, size in enumerate(shape) if size != 1]
    return long_dims[0] if len(long_dims) == 1 else None


def aligned_strategies(call: OperatorCall, patterns: IndexPatterns, values: str) -> Iterator[Strategy]:
    """Yield strategies that split an indexed dim and the dim of its index tensor, a range, together.

    `values` is the pattern of what is read or written.
    """
    inputs = [patterns.source, *patterns.indices, *([values] if len(call.inputs) > len(patterns.indices) + 1 else [])]
    for place, position in enumerate(patterns.positions):
        index, size = call.argument("indices")[position], logical_shape(call.inputs[0])[position]
        dim = find_range_dim(index)
        if dim is None or logical_shape(index)[dim] != size or list_traced_counts(size):
            continue
        letter = patterns.indices[place][dim]
        tried: list[tuple[int, ...]] = []
        for number, (text, placement) in enumerate(zip(inputs, call.current_placements, strict=True)):
            wanted = position if number == 0 else text.find(letter)
            if not isinstance(placement, Shard) or placement.dim != wanted or placement.lengths in tried:
                continue
            tried.append(placement.lengths)
            rest = tuple(make_placement(item, letter, placement, Replicate()) for item in inputs[1:])
            rows = Shard(position, placement.lengths)
            is_write = len(inputs) > len(patterns.indices) + 1
            output = rows if is_write else Shard(values.index(letter), placement.lengths)
            yield Strategy((rows, *rest), (output,), make_aligned_lowering(position, rows))


def make_aligned_lowering(position: int, rows: Shard) -> LoweringRule:
    """Return a lowering in which the index of the sharded dim counts from the rank's first row."""

    def lower(builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LocalValue:
        indices = list(args[1])
        indices[position] = builder.call(aten.sub.Tensor, indices[position], rows.start(builder.rank))
        return builder.call(call.operator, args[0], indices, *args[2:], **kwargs)

    return lower


def index_put_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of writing or adding values at indices.

    The dims that are not indexed can be sharded. If values are added, the indices can be: each rank adds its own values
    to a partial sum.
    """
    patterns = make_index_patterns(call)
    if patterns is None:
        return
    values = make_values_pattern(call, patterns)
    yield from aligned_strategies(call, patterns, values)
    kept = "".join(letter if letter in patterns.source else "." for letter in values)
    fixed = ["." * len(text) for text in patterns.indices]
    yield from split_strategies(call, ",".join([patterns.source, *fixed, kept]) + "->" + patterns.source)
    if call.argument("accumulate"):
        added = [*patterns.indices, "".join("." if letter in patterns.source else letter for letter in values)]
        yield from added_strategies(call, added)


def added_strategies(call: OperatorCall, texts: list[str]) -> Iterator[Strategy]:
    """Yield strategies of adding values to the first input: if the others are sharded, it becomes a partial sum.

    `texts` are the patterns of the other inputs. A sum of booleans is no sum. In float16 the terms may be too large;
    gradients are the exception, as for sums.
    """
    dtype = call.node.meta["val"].dtype
    if dtype == torch.bool or (dtype == torch.float16 and not call.node.meta.get("backward")):
        return
    first = "." * len(logical_shape(call.inputs[0]))
    for strategy in split_strategies(call, ",".join([first, *texts]) + "->" + first):
        yield replace(strategy, inputs=(Partial(), *strategy.inputs[1:]))


def scatter_add_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield sharding on dims of equal sizes, and partial sums for indices that are sharded along the indexed dim."""
    yield from along_dim_strategies(call)
    target, index, source = (logical_shape(node) for node in call.inputs)
    if not target or not len(target) == len(index) == len(source):
        return
    # An entry's place along the indexed dim is free. Along every other dim it is the place that the entry adds to.
    along = call.argument("dim") % len(index)
    text = "".join("Z" if dim == along and index[dim] == source[dim] else "." for dim in range(len(index)))
    yield from added_strategies(call, [text, text])


def get_rows_pattern(call: OperatorCall) -> tuple[int, str]:
    """Return the indexed dim of operators on rows by index, and the pattern of a tensor with all other dims."""
    count = len(logical_shape(call.inputs[0]))
    dim = call.argument("dim") % max(count, 1)
    return dim, make_letters(count, [dim])


def index_add_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield sharding on dims that are not indexed, and partial sums for a sharded list of indices."""
    dim, text = get_rows_pattern(call)
    if not text or len(logical_shape(call.inputs[2])) != len(text):
        return
    yield from split_strategies(call, f"{text},.,{text}->{text}")
    rows = "." * dim + "Z" + "." * (len(text) - dim - 1)
    yield from added_strategies(call, ["Z", rows])


def index_copy_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield sharding on dims that are not indexed."""
    _, text = get_rows_pattern(call)
    if text and len(logical_shape(call.inputs[2])) == len(text):
        yield from split_strategies(call, f"{text},.,{text}->{text}")


def index_reduce_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield sharding on dims that are not indexed, but not of products in half precision.

    PyTorch's kernel fails there for a single slice, and a rank may have just one.
    """
    is_half = call.node.meta["val"].dtype in ACCUMULATED_IN
    if not (is_half and call.argument("reduce") == "prod"):
        yield from index_copy_strategies(call)


def index_fill_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield sharding on dims that are not indexed."""
    _, text = get_rows_pattern(call)
    rest = ",." * (len(call.slots) - 1)
    yield from split_strategies(call, f"{text}{rest}->{text}")


def take_pattern(call: OperatorCall) -> str:
    """Return the pattern of reading a tensor as if it had one dim; every dim of the indices can be sharded."""
    text = make_letters(len(logical_shape(call.inputs[1])))
    return f"*,{text}->{text}"


def put_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield partial sums for values that are added at sharded indices."""
    if call.argument("accumulate") and logical_shape(call.inputs[1]) == logical_shape(call.inputs[2]):
        text = make_letters(len(logical_shape(call.inputs[1])))
        yield from added_strategies(call, [text, text])


def search_pattern(call: OperatorCall) -> str:
    """Return the pattern of finding places in sorted rows: rows, and the values that are looked up, can be sharded."""
    rows, wanted = logical_shape(call.inputs[0]), logical_shape(call.inputs[1])
    found = make_letters(len(wanted))
    sequence = "." if len(rows) == 1 else found[: len(rows) - 1] + "."
    return f"{sequence},{found},{sequence}->{found}"


def compare_with_set_pattern(call: OperatorCall) -> str:
    """Return the pattern of an elementwise operator with a second input that is needed whole."""
    text = make_letters(len(logical_shape(call.inputs[0])))
    return f"{text},*->{text}"


RULES: dict[Any, ShardingRule] = {
    aten.gather.default: gather_strategies,
    aten.scatter.src: along_dim_strategies,
    aten.scatter.value: along_dim_strategies,
    aten.scatter.reduce: along_dim_strategies,
    aten.scatter.value_reduce: along_dim_strategies,
    aten.scatter_reduce.two: along_dim_strategies,
    aten.scatter_add.default: scatter_add_strategies,
    aten.index_select.default: index_select_strategies,
    aten.index.Tensor: index_strategies,
    aten.index_put.default: index_put_strategies,
    aten._unsafe_index.Tensor: index_strategies,
    aten._unsafe_index_put.default: index_put_strategies,
    aten.index_add.default: index_add_strategies,
    aten.index_reduce.default: index_reduce_strategies,
    aten.index_copy.default: index_copy_strategies,
    aten.index_fill.int_Scalar: index_fill_strategies,
    aten.index_fill.int_Tensor: index_fill_strategies,
    aten.take.default: make_pattern_rule(take_pattern),
    aten.put.default: put_strategies,
    aten.searchsorted.Tensor: make_pattern_rule(search_pattern),
    aten.bucketize.Tensor: make_pattern_rule(compare_with_set_pattern),
    aten.isin.Tensor_Tensor: make_pattern_rule(compare_with_set_pattern),
}

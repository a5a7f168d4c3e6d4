"""Rules for operators on rows that values select, by a mask or by the numbers of the rows.

Each adds strategies to those of `rules.indexing`. The rows that a mask selects in a divided dim are divided with it. An
index may have their numbers, as of `torch.where(mask)`. See Note [selections of divided rows].
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import SymInt, fx
from torch.utils import _pytree as pytree

from rankless.compiler.ir import local_kernels
from rankless.compiler.ir.logical_program import LogicalValue, is_random_node
from rankless.compiler.rules import indexing
from rankless.compiler.rules.indexing import COPIES, VIEWS, IndexPatterns
from rankless.compiler.rules.pattern import make_letters, make_placement, split_strategies
from rankless.compiler.rules.strategy import (
    GraphBuilder,
    LocalValue,
    OperatorCall,
    ShardingRule,
    Strategy,
    find_local_range,
    logical_shape,
)
from rankless.compiler.selected_rows.selections import find_selection, get_selections, is_reordered
from rankless.compiler.tracing.symbolic_sizes import find_traced_count, has_count, list_traced_counts
from rankless.errors import CaptureError
from rankless.parallel.tensor_placement import BlockedShard, OnRank, Placement, Replicate, Shard

aten = torch.ops.aten

EQUAL_ROWS = {aten.expand.default: 1, aten.full.default: 0, aten.ones.default: 0, aten.zeros.default: 0}
"""Operators that make equal rows, and the place of the size among their arguments."""
SIZE_ONE_VIEWS = (*VIEWS, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)


@dataclass(frozen=True)
class RowNumbers:
    """The places of what a mask selects, along one dim of it.

    Args:
        mask: The mask.
        dim: The dim.
    """

    mask: fx.Node
    dim: int


def find_row_numbers(node: fx.Node) -> RowNumbers | None:
    """Return what a value has the numbers of, if the program shows that they come from a mask; None for others."""
    places = node
    column: int | None = None
    while places.target is not aten.nonzero.default:
        if places.op != "call_function" or not places.all_input_nodes:
            return None
        source = places.all_input_nodes[0]
        if places.target is getitem and source.target is aten.unbind.int and source.args[1:] in ((1,), (-1,)):
            column, source = int(str(places.args[1])), source.all_input_nodes[0]
        elif places.target is aten.select.int and places.args[1] in (1, -1) and column is None:
            column = int(str(places.args[2])) % logical_shape(source)[1]
        elif places.target not in (*COPIES, *SIZE_ONE_VIEWS) or not keeps_rows(places):
            return None
        places = source
    mask = places.all_input_nodes[0]
    if column is None and len(logical_shape(mask)) != 1:
        return None
    return RowNumbers(mask, column or 0)


def has_row_numbers(node: fx.Node) -> bool:
    """Return whether a value is the places of what a mask selects, or a part or view of them."""
    while node.target is not aten.nonzero.default:
        if node.target not in (getitem, aten.unbind.int, aten.select.int, *COPIES, *SIZE_ONE_VIEWS):
            return False
        node = node.all_input_nodes[0]
    return True


def keeps_rows(node: fx.Node) -> bool:
    """Return whether a copy or a view of selected rows only adds or drops dims of size one."""
    if node.meta["val"].dtype not in (torch.int32, torch.int64):
        return False
    long = [[size for size in logical_shape(item) if size != 1] for item in (node, node.all_input_nodes[0])]
    return len(long[0]) == len(long[1]) == 1 and str(long[0][0]) == str(long[1][0])


def list_mask_parts(call: OperatorCall, mask: fx.Node, first: int) -> Iterator[Shard]:
    """Yield the ways in which the first input, whose dims from `first` on a mask selects in, or the mask is divided."""
    count = len(logical_shape(mask))
    found: list[Shard] = []
    for value, offset in ((mask, 0), (call.inputs[0], first)):
        placement = call.placements.get(value, Replicate())
        if isinstance(placement, Shard) and offset <= placement.dim < offset + count:
            divided = Shard(placement.dim - offset, placement.lengths)
            if divided not in found:
                found.append(divided)
                yield divided


def divide_rows(call: OperatorCall, mask: fx.Node, part: Shard, dim: int) -> Shard:
    """Return how the rows that a mask selects are divided, in a dim of their own, if the mask is divided."""
    limit = call.node.meta["val"]
    known = [size for value in (limit, *[item.meta["val"] for item in call.inputs]) for size in value.shape]
    count = next(size for size in known if find_traced_count(size) is not None)
    return Shard(dim, get_selections(count).divide(count, mask, part, call.axis).counts)


def has_counted_size(call: OperatorCall) -> bool:
    """Return whether a value of a call has a count of selected rows as a size."""
    values = (call.node.meta["val"], *[item.meta["val"] for item in call.inputs])
    return any(isinstance(size, SymInt) and find_traced_count(size) for value in values for size in value.shape)


def nonzero_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of the places of what is not zero: each rank finds those in its part."""
    (mask,) = call.inputs
    for part in list_mask_parts(call, mask, 0) if has_counted_size(call) else ():
        yield Strategy((part,), (divide_rows(call, mask, part, 0),), lower_nonzero)


def lower_nonzero(
    builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], _kwargs: dict[str, Any]
) -> LocalValue:
    """Find places in this rank's part, and number them as in the whole."""
    shape, sharding = logical_shape(call.inputs[0]), builder.input_sharding(0)
    starts = [find_local_range(builder, sharding, dim, size)[0] for dim, size in enumerate(shape)]
    return builder.call(local_kernels.find_places, args[0], starts)


def select_strategies(call: OperatorCall, mask: fx.Node, first: int) -> Iterator[Strategy]:
    """Yield strategies of `source[mask]`, where the mask selects in the source's dims from `first` on."""
    if not has_counted_size(call):
        return
    for part in list_mask_parts(call, mask, first):
        rows = Shard(first + part.dim, part.lengths)
        yield Strategy((rows, part), (divide_rows(call, mask, part, first),))
    yield from split_strategies(call, "{},{}->{}".format(*make_mask_texts(call, mask, first)))


def make_mask_texts(call: OperatorCall, mask: fx.Node, first: int) -> tuple[str, str, str]:
    """Return the patterns of a source, of a mask in it, which is whole, and of the selected rows."""
    count, dims = len(logical_shape(mask)), len(logical_shape(call.inputs[0]))
    source = make_letters(dims, list(range(first, first + count)))
    return source, "." * count, source[:first] + "." + source[first + count :]


def put_strategies(call: OperatorCall, mask: fx.Node, first: int) -> Iterator[Strategy]:
    """Yield strategies of writing rows to, or adding them at, what a mask selects."""
    values = logical_shape(call.inputs[2])
    source, whole, selected = make_mask_texts(call, mask, first)
    dim = len(values) - len(selected) + first
    is_broadcast = dim < 0 or values[dim] == 1
    for part in list_mask_parts(call, mask, first) if is_broadcast or has_counted_size(call) else ():
        rows = Shard(first + part.dim, part.lengths)
        given = Replicate() if is_broadcast else divide_rows(call, mask, part, dim)
        yield Strategy((rows, part, given), (rows,))
    if len(values) == len(selected) and all(size != 1 for size in values):
        yield from split_strategies(call, f"{source},{whole},{selected}->{source}")


def equal_rows_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of making equal rows, as many as a mask selects: each rank makes as many as it has selected."""
    if call.operator not in EQUAL_ROWS:
        return
    (shape,) = call.output_shapes
    given = logical_shape(call.inputs[0]) if call.inputs else ()
    added = len(shape) - len(given)
    # The program may have been divided before, among other ranks: only selections of values divided now count.
    present = [find_selection(placement) for placement in call.placements.values()]
    for dim, size in enumerate(shape):
        is_repeated = dim < added or (isinstance(given[dim - added], int) and given[dim - added] == 1)
        if is_repeated and find_traced_count(size) is not None:
            for selection in get_selections(size).list_divided(size, call.axis):
                if any(selection is item for item in present):
                    yield Strategy((Replicate(),) * len(call.inputs), (Shard(dim, selection.counts),), lower_equal_rows)


def lower_equal_rows(
    builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> LocalValue:
    """Make this rank's rows."""
    local = list(args)
    local[EQUAL_ROWS[call.operator]] = builder.output_size(0)
    return builder.call(call.operator, *local, **kwargs)


def masked_scatter_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of writing one element after the other where a mask of the same shape selects."""
    target, mask, source = call.inputs
    same = logical_shape(target) == logical_shape(mask)
    if same and len(logical_shape(source)) == 1 and has_counted_size(call):
        for part in list_mask_parts(call, mask, 0):
            yield Strategy((part, part, divide_rows(call, mask, part, 0)), (part,))


def list_row_parts(call: OperatorCall, index: fx.Node, letter_dim: int, dim: int) -> Iterator[tuple[Shard, Shard]]:
    """Yield how a source's dim and the selected rows' numbers are divided alike.

    Args:
        call: The call.
        index: The numbers.
        letter_dim: Their dim.
        dim: The dim of the first input in which they count.
    """
    numbers, placement = find_row_numbers(index), call.placements.get(index)
    if numbers is None or not isinstance(placement, Shard) or placement.dim != letter_dim:
        return
    selection = find_selection(placement)
    if selection is None or selection.mask is not numbers.mask or selection.dim != numbers.dim:
        return
    if str(logical_shape(numbers.mask)[numbers.dim]) == str(logical_shape(call.inputs[0])[dim]):
        yield Shard(dim, selection.lengths), placement


def lower_own_rows(
    builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> LocalValue:
    """Number selected rows from this rank's first one, in each dim of the source that is divided."""
    shape, sharding = logical_shape(call.inputs[0]), builder.input_sharding(0)
    divided = {item.dim for item in sharding if isinstance(item, Shard)}

    def count_from_first(index: Any, dim: int) -> Any:
        if index is None or dim not in divided:
            return index
        return builder.call(aten.sub.Tensor, index, find_local_range(builder, sharding, dim, shape[dim])[0])

    if "indices" in [item.name for item in call.operator._schema.arguments]:
        indices = [count_from_first(index, dim) for dim, index in enumerate(args[1])]
        return builder.call(call.operator, args[0], indices, *args[2:], **kwargs)
    dim = args[1] % len(shape)
    return builder.call(call.operator, args[0], dim, count_from_first(args[2], dim), *args[3:], **kwargs)


def by_number_strategies(call: OperatorCall, dim: int, rest: Sequence[int | None]) -> Iterator[Strategy]:
    """Yield strategies of reading or writing selected rows along a dim by a list of their numbers.

    Args:
        call: The call, with the source and the list as its first inputs.
        dim: The dim.
        rest: For each further input, its dim of rows; None if it has none.
    """
    for rows, numbers in list_row_parts(call, call.inputs[1], 0, dim):
        given: list[Placement] = [Replicate() if item is None else Shard(item, numbers.lengths) for item in rest]
        output = rows if rest or call.operator is not aten.index_select.default else Shard(dim, numbers.lengths)
        yield Strategy((rows, numbers, *given), (output,), lower_own_rows)


def uses_row_numbers_rightly(node: fx.Node, strategy: Strategy | None) -> bool:
    """Return whether an operator that takes numbers of selected rows reads or writes these, or only views the numbers.

    The numbers of each part of a batch count from its own first row.
    """
    takes_numbers = any(map(has_row_numbers, node.all_input_nodes))
    return not takes_numbers or has_row_numbers(node) or (strategy is not None and strategy.lower is lower_own_rows)


def find_mask(call: OperatorCall) -> tuple[fx.Node, int] | None:
    """Return the only index of an indexing, if it is a mask, and the first dim in which it selects."""
    given = [(index, position) for position, index in enumerate(call.argument("indices")) if index is not None]
    return given[0] if len(given) == 1 and given[0][0].meta["val"].dtype == torch.bool else None


def numbered_strategies(call: OperatorCall, patterns: IndexPatterns, values: str) -> Iterator[Strategy]:
    """Yield strategies that divide an indexed dim and the numbers of the rows that a mask selects in it together.

    See Note [selections of divided rows]. `values` is the pattern of what is read or written.
    """
    is_write = len(call.inputs) > len(patterns.indices) + 1
    for place, position in enumerate(patterns.positions):
        index = call.argument("indices")[position]
        for dim, letter in enumerate(patterns.indices[place]):
            for rows, numbers in list_row_parts(call, index, dim, position) if letter != "." else ():
                texts = [*patterns.indices, *([values] if is_write else [])]
                rest = (make_placement(text, letter, numbers, Replicate()) for text in texts)
                output = rows if is_write else Shard(values.index(letter), numbers.lengths)
                yield Strategy((rows, *rest), (output,), lower_own_rows)


def index_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of `source[indices]`."""
    patterns = indexing.make_index_patterns(call)
    if patterns is None:
        if (mask := find_mask(call)) is not None:
            yield from select_strategies(call, *mask)
        return
    yield from numbered_strategies(call, patterns, patterns.values)
    yield from indexing.index_strategies(call)


def index_put_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of writing or adding values at indices."""
    patterns = indexing.make_index_patterns(call)
    if patterns is None:
        if (mask := find_mask(call)) is not None:
            yield from put_strategies(call, *mask)
        return
    yield from numbered_strategies(call, patterns, indexing.make_values_pattern(call, patterns))
    yield from indexing.index_put_strategies(call)


def index_select_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of rows by a list of their numbers."""
    count = len(logical_shape(call.inputs[0]))
    yield from by_number_strategies(call, call.argument("dim") % max(count, 1), [])
    yield from indexing.index_select_strategies(call)


def index_add_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of adding rows at a list of their numbers."""
    dim, text = indexing.get_rows_pattern(call)
    if text and len(logical_shape(call.inputs[2])) == len(text):
        yield from by_number_strategies(call, dim, [dim])
    yield from indexing.index_add_strategies(call)


def list_for_counts(call: OperatorCall, list_others: Callable[[], Sequence[Strategy]]) -> Iterator[Strategy]:
    """Yield the strategies of an operator on rows that values select; none if its rule needs their number.

    Of those that send as much, the first select on all ranks: fewer rows move than there are.

    What is not in the order of one device is neither drawn in parts, nor regrouped by a view.

    Args:
        call: The operator.
        list_others: Returns its strategies for any rows.
    """
    try:
        found = [*equal_rows_strategies(call), *list_others()]
    except CaptureError:
        return
    for strategy in sorted(found, key=lambda item: any(isinstance(output, OnRank) for output in item.outputs)):
        placements = (*strategy.inputs, *strategy.outputs)
        if is_reordered(placements) and (is_random_node(call.node) or not all(map(is_plain_selection, placements))):
            continue
        yield strategy


def is_plain_selection(placement: Placement) -> bool:
    """Return whether a placement divides selected rows as they are, or divides others."""
    is_counted = isinstance(placement, Shard | BlockedShard) and has_count(placement.lengths)
    return not is_counted or find_selection(placement) is not None


def takes_counts(call: OperatorCall) -> bool:
    """Return whether a size of an operator's values or arguments is a count; see Note [counts of selected rows]."""
    values = [*[node.meta["val"] for node in call.inputs], *call.outputs]
    sizes = [size for value in values if isinstance(value, LogicalValue) for size in value.shape]
    arguments = pytree.tree_leaves((call.node.args, call.node.kwargs))
    return any(map(list_traced_counts, [*sizes, *arguments]))


RULES: dict[Any, ShardingRule] = {
    aten.nonzero.default: nonzero_strategies,
    aten.masked_scatter.default: masked_scatter_strategies,
    aten.index.Tensor: index_strategies,
    aten._unsafe_index.Tensor: index_strategies,
    aten.index_put.default: index_put_strategies,
    aten._unsafe_index_put.default: index_put_strategies,
    aten.index_select.default: index_select_strategies,
    aten.index_add.default: index_add_strategies,
}
"""They replace those of `rules.indexing`."""

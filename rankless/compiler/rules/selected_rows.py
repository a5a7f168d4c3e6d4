"""Rules for rows that values select, by a mask or by their numbers, and what the program knows of an index.

An index may be a range, 0, 1, 2, … along one of its dims, as `torch.arange(len(x))` in `x[range, y]`. It may have the
numbers of the rows that a mask selects, as of `torch.where(mask)`. See Note [selections of divided rows].
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import SymInt, fx

from rankless.compiler.ir import local_kernels
from rankless.compiler.rules.pattern import make_letters, split_strategies
from rankless.compiler.rules.strategy import (
    GraphBuilder,
    LocalValue,
    OperatorCall,
    Strategy,
    find_local_range,
    logical_shape,
)
from rankless.compiler.tracing.row_counts import find_traced_count
from rankless.compiler.tracing.row_selections import find_selection, get_selections
from rankless.parallel.tensor_placement import Placement, Replicate, Shard

aten = torch.ops.aten

RANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)
COPIES = (aten._to_copy.default, aten.clone.default, aten.alias.default, aten.lift_fresh_copy.default)
VIEWS = (aten.view.default, aten._unsafe_view.default)
EQUAL_ROWS = {aten.expand.default: 1, aten.full.default: 0, aten.ones.default: 0, aten.zeros.default: 0}
"""Operators that make equal rows, and the place of the size among their arguments."""
SIZE_ONE_VIEWS = (*VIEWS, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)


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

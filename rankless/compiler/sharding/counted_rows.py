"""Strategies of operators on rows that values select; see Note [counts of selected rows]."""

from collections.abc import Iterator

from torch.utils import _pytree as pytree

from rankless.compiler.ir.logical_program import LogicalValue, is_random_node
from rankless.compiler.rules.selected_rows import equal_rows_strategies
from rankless.compiler.rules.strategy import OperatorCall, ShardingRule, Strategy
from rankless.compiler.sharding.owner_strategies import list_strategies, no_strategies
from rankless.compiler.sharding.strategy_costs import list_outputs
from rankless.compiler.tracing.row_counts import has_count, list_traced_counts
from rankless.compiler.tracing.row_selections import find_selection, is_reordered
from rankless.errors import CaptureError
from rankless.parallel.tensor_placement import BlockedShard, OnRank, Placement, Shard


def list_for_counts(call: OperatorCall, rule: ShardingRule | None) -> Iterator[Strategy]:
    """Yield the strategies of an operator on rows that values select; none if its rule needs their number.

    Of those that send as much, the first select on all ranks: fewer rows move than there are.

    What is not in the order of one device is neither drawn in parts, nor regrouped by a view.
    """
    try:
        found = [*equal_rows_strategies(call), *list_strategies(call, no_strategies if rule is None else rule)]
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
    values = [*[node.meta["val"] for node in call.inputs], *list_outputs(call)]
    sizes = [size for value in values if isinstance(value, LogicalValue) for size in value.shape]
    arguments = pytree.tree_leaves((call.node.args, call.node.kwargs))
    return any(map(list_traced_counts, [*sizes, *arguments]))

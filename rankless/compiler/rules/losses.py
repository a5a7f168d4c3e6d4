"""Rules for negative log likelihood: a sum of losses over a sum of weights (`reductions`, Note [sums over counts])."""

from collections.abc import Iterator
from operator import getitem
from typing import Any

import torch

from rankless.compiler.ir import ctc_operators  # noqa: F401  # registers the operators used below
from rankless.compiler.rules.pattern import make_letters, require_rows, split_strategies
from rankless.compiler.rules.strategy import (
    GraphBuilder,
    LocalValue,
    OperatorCall,
    ShardingRule,
    Strategy,
    logical_shape,
)
from rankless.parallel.tensor_placement import Partial, Replicate

aten = torch.ops.aten
rankless_ops = torch.ops.rankless
NONE, MEAN, SUM = 0, 1, 2


def make_nll_patterns(call: OperatorCall, position: int) -> tuple[str, str]:
    """Return the patterns of scores (classes on dim 1 stay replicated) and of targets."""
    scores = make_letters(len(logical_shape(call.inputs[position])), [1])
    return scores, scores.replace(".", "", 1)


def nll_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies: each rank sums the losses of its rows; a mean divides by the weight of all valid targets."""
    if len(logical_shape(call.inputs[0])) < 2:
        return
    scores, targets = make_nll_patterns(call, 0)
    reduction = call.argument("reduction")
    if reduction == NONE:
        yield from split_strategies(call, f"{scores},{targets},*->{targets},=")
        return
    for strategy in split_strategies(call, f"{scores},{targets},*->,"):
        if reduction == SUM:
            yield strategy
        else:
            yield Strategy(strategy.inputs, (Partial(), Replicate()), lower_sum_over_count)


def lower_sum_over_count(
    builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], _kwargs: dict[str, Any]
) -> LocalValue:
    """Divide the local sum of losses by the reduced sum of weights.

    The result is correct even if a rank's targets are all ignored.
    """
    scores, target, weight, _, ignore_index = args
    results = builder.call(call.operator, scores, target, weight, SUM, ignore_index)
    losses, valid = builder.call(getitem, results, 0), builder.call(getitem, results, 1)
    total = builder.all_reduce(valid, "number of valid targets in the whole batch", total_weight_bytes(call))
    return builder.call(aten.div.Tensor, losses, total), total


def total_weight_bytes(call: OperatorCall) -> int:
    """Return the size of the sum of weights, which is the second output."""
    return int(call.node.meta["val"][1].element_size())


def nll_backward_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of the gradient: row by row, given the total weight of the batch."""
    if len(logical_shape(call.inputs[1])) < 2:
        return
    scores, targets = make_nll_patterns(call, 1)
    grads = targets if call.argument("reduction") == NONE else "*"
    yield from split_strategies(call, f"{grads},{scores},{targets},*,*->{scores}")


def ctc_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of a CTC loss: each rank has sequences. Targets that lie one after the other are not divided."""
    if len(logical_shape(call.inputs[1])) > 1:
        yield from split_strategies(call, ".Z.,Z.,Z,Z->Z")


def ctc_backward_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of its gradient."""
    if len(logical_shape(call.inputs[2])) > 1:
        yield from split_strategies(call, "Z,.Z.,Z.,Z,Z->.Z.")


RULES: dict[Any, ShardingRule] = {
    aten.nll_loss_forward.default: nll_strategies,
    aten.nll_loss2d_forward.default: nll_strategies,
    aten.nll_loss_backward.default: nll_backward_strategies,
    aten.nll_loss2d_backward.default: nll_backward_strategies,
    rankless_ops.ctc_loss.default: require_rows(ctc_strategies),
    rankless_ops.ctc_loss_backward.default: require_rows(ctc_backward_strategies),
}

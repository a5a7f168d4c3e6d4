"""Negative log likelihood: a sum of losses over a sum of weights (see reductions, Note [sums over counts])."""

from collections.abc import Iterator
from operator import getitem
from typing import Any

import torch

from rankless.compiler.rules.pattern import letters, split
from rankless.compiler.rules.strategy import Call, Emit, Local, Rule, Strategy, shape_of
from rankless.parallel.placement import Partial, Replicate

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2


def texts(call: Call, position: int) -> tuple[str, str]:
    """The patterns of scores (classes on dim 1 stay whole) and of targets."""
    scores = letters(len(shape_of(call.inputs[position])), [1])
    return scores, scores.replace(".", "", 1)


def forward(call: Call) -> Iterator[Strategy]:
    """Losses are summed over the rows of a rank; the mean divides by the weights of all valid targets."""
    if len(shape_of(call.inputs[0])) < 2:
        return
    scores, targets = texts(call, 0)
    reduction = call.argument("reduction")
    if reduction == NONE:
        yield from split(call, f"{scores},{targets},*->{targets},=")
        return
    for strategy in split(call, f"{scores},{targets},*->,"):
        if reduction == SUM:
            yield strategy
        else:
            yield Strategy(strategy.inputs, (Partial(), Replicate()), sum_over_count)


def sum_over_count(emit: Emit, call: Call, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Local:
    """Local sum of losses over the reduced sum of weights; right too if a rank's targets are all ignored."""
    scores, target, weight, _, ignore_index = args
    results = emit.call(call.operator, scores, target, weight, SUM, ignore_index)
    losses, valid = emit.call(getitem, results, 0), emit.call(getitem, results, 1)
    total = emit.all_reduce(valid, "number of valid targets in the whole batch", bytes_of_total(call))
    return emit.call(aten.div.Tensor, losses, total), total


def bytes_of_total(call: Call) -> int:
    """The size of the sum of weights, the second output."""
    return int(call.node.meta["val"][1].element_size())


def backward(call: Call) -> Iterator[Strategy]:
    """Row by row, given the whole batch's sum of weights."""
    if len(shape_of(call.inputs[1])) < 2:
        return
    scores, targets = texts(call, 1)
    grads = targets if call.argument("reduction") == NONE else "*"
    yield from split(call, f"{grads},{scores},{targets},*,*->{scores}")


RULES: dict[Any, Rule] = {
    aten.nll_loss_forward.default: forward,
    aten.nll_loss2d_forward.default: forward,
    aten.nll_loss_backward.default: backward,
    aten.nll_loss2d_backward.default: backward,
}

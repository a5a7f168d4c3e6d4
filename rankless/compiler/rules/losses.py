"""Rules for negative log likelihood: a sum of losses over a sum of weights (`reductions`, Note [sums over counts])."""

from collections.abc import Iterator
from operator import getitem
from typing import Any

import torch
from torch import fx

from rankless.compiler.ir import (
    ctc_operators,  # noqa: F401  # registers the operators used below
    vocabulary_kernels,
)
from rankless.compiler.rules.half_precision import ACCUMULATED_IN
from rankless.compiler.rules.pattern import make_letters, require_rows, split_strategies
from rankless.compiler.rules.strategy import (
    GraphBuilder,
    LocalValue,
    OperatorCall,
    ShardingRule,
    Strategy,
    find_local_range,
    logical_shape,
)
from rankless.parallel.tensor_placement import Partial, Placement, Replicate, Shard, is_divided_along

aten = torch.ops.aten
rankless_ops = torch.ops.rankless
NONE, MEAN, SUM = 0, 1, 2


def get_class_dim(shape: tuple[int, ...]) -> int:
    """Return the dim of scores, shape (rows, classes, …) or (classes,), that holds the classes."""
    return min(len(shape), 2) - 1


def make_nll_patterns(shape: tuple[int, ...]) -> tuple[str, str]:
    """Return the patterns of scores, whose classes stay replicated, and of targets."""
    scores = make_letters(len(shape), [get_class_dim(shape)])
    return scores, scores.replace(".", "", 1)


def has_loss_per_target(call: OperatorCall, shape: tuple[int, ...]) -> bool:
    """Return whether there is one loss for each target; one row of scores alone has one loss whatever is asked for."""
    return bool(call.argument("reduction") == NONE and len(shape) > 1)


def list_class_shards(call: OperatorCall, position: int) -> Iterator[Shard]:
    """Yield the placement of the scores, the input at this position, if it divides classes."""
    placement = call.current_placements[position]
    if isinstance(placement, Shard) and placement.dim == get_class_dim(logical_shape(call.inputs[position])):
        yield placement


# Note [losses of classes]: the rows and the classes of scores can be divided, also at once. A rank counts the targets
# that are among its classes, so the sums of losses and of weights are partial along all axes that divide scores. One
# lowering serves them all. No scores are sent.


def nll_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies: each rank sums the losses of its rows and classes; a mean divides by all targets' weight."""
    shape = logical_shape(call.inputs[0])
    scores, targets = make_nll_patterns(shape)
    if has_loss_per_target(call, shape):
        yield from split_strategies(call, f"{scores},{targets},*->{targets},=")
        outputs: tuple[Placement, ...] = (Partial(), Replicate())
    else:
        is_mean = call.argument("reduction") == MEAN
        outputs = (Partial(), Replicate() if is_mean else Partial())
        if len(shape) > 1:
            for strategy in split_strategies(call, f"{scores},{targets},*->,"):
                yield Strategy(strategy.inputs, outputs, lower_losses if is_mean else None)
    for placement in list_class_shards(call, 0):
        weight = (Shard(0, placement.lengths),) * (len(call.inputs) - 2)
        yield Strategy((placement, Replicate(), *weight), outputs, lower_losses)


def lower_losses(
    builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], _kwargs: dict[str, Any]
) -> LocalValue:
    """Compute this rank's terms of losses and weights, and divide by the reduced sum of weights for a mean.

    The result is correct even if a rank's targets are all ignored.
    """
    if has_loss_per_target(call, logical_shape(call.inputs[0])):
        scores, target, weight = args[:3]
        classes, dtype = find_class_range(builder, call, 0), call.node.meta["val"][0].dtype
        terms = builder.call(vocabulary_kernels.find_target_losses, scores, target, weight, classes, dtype)
        return builder.call(getitem, terms, 0), builder.call(aten.new_zeros.default, scores, [])
    terms = lower_loss_terms(builder, call, args)
    return finish_losses(builder, call, *(builder.call(getitem, terms, index) for index in range(2)))


def lower_loss_terms(builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...]) -> fx.Node:
    """Return this rank's terms of the sums of losses and of weights, in the dtype in which sums are accumulated."""
    scores, target, weight, _, ignore_index = args
    dtype = call.node.meta["val"][0].dtype
    wide = ACCUMULATED_IN.get(dtype, dtype)
    if wide != dtype or has_divided_classes(builder, call):
        classes = find_class_range(builder, call, 0)
        return builder.call(vocabulary_kernels.add_target_losses, scores, target, weight, classes, wide)
    return builder.call(call.operator, scores, target, weight, SUM, ignore_index)


def finish_losses(builder: GraphBuilder, call: OperatorCall, loss: fx.Node, total: fx.Node) -> LocalValue:
    """Return the loss and the weight of all targets from this rank's terms; both are whole or terms of sums."""
    dtype = call.node.meta["val"][0].dtype
    wide = ACCUMULATED_IN.get(dtype, dtype)
    if call.argument("reduction") == MEAN:
        total = builder.all_reduce(total, "number of valid targets in the whole batch", wide.itemsize)
        loss = builder.call(aten.div.Tensor, loss, total)
    if wide == dtype:
        return loss, total
    return builder.call(aten.to.dtype, loss, dtype), builder.call(aten.to.dtype, total, dtype)


def find_class_range(builder: GraphBuilder, call: OperatorCall, position: int) -> vocabulary_kernels.ClassRange:
    """Return this rank's classes from the sharding of the scores, the input at this position."""
    shape = logical_shape(call.inputs[position])
    dim = get_class_dim(shape)
    start, length = find_local_range(builder, builder.input_sharding(position), dim, shape[dim])
    return dim, start, length, shape[dim], call.argument("ignore_index")


def has_divided_classes(builder: GraphBuilder, call: OperatorCall) -> bool:
    """Return whether this rank has a part of the classes of the scores, the first input."""
    dim = get_class_dim(logical_shape(call.inputs[0]))
    return any(is_divided_along(item, dim) for item in builder.input_sharding(0))


def nll_backward_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of the gradient: row by row or class by class, given the total weight of the batch."""
    shape = logical_shape(call.inputs[1])
    scores, targets = make_nll_patterns(shape)
    if len(shape) > 1:
        grads = targets if has_loss_per_target(call, shape) else "*"
        yield from split_strategies(call, f"{grads},{scores},{targets},*,*->{scores}")
    for placement in list_class_shards(call, 1):
        weight = (Shard(0, placement.lengths),) * (len(call.inputs) - 4)
        inputs = (Replicate(), placement, Replicate(), *weight, Replicate())
        yield Strategy(inputs, (placement,), lower_class_gradient)


def lower_class_gradient(
    builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], _kwargs: dict[str, Any]
) -> LocalValue:
    """Compute the gradient of the scores of this rank's classes."""
    grad, scores, target, weight, reduction, _, total = args
    classes = find_class_range(builder, call, 1)
    return builder.call(
        vocabulary_kernels.differentiate_target_losses,
        call.operator,
        (grad, scores, target, weight),
        classes,
        reduction,
        total,
    )


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

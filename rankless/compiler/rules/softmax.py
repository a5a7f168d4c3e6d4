"""Rules for softmax: every dim can be sharded, the normalized one too.

See Note [sharded softmax] in `vocabulary_kernels`.
"""

from collections.abc import Iterator
from math import prod
from typing import Any

import torch

from rankless.compiler.ir import vocabulary_kernels
from rankless.compiler.rules.half_precision import ACCUMULATED_IN
from rankless.compiler.rules.pattern import make_letters, split_strategies
from rankless.compiler.rules.strategy import (
    GraphBuilder,
    LocalValue,
    LoweringRule,
    OperatorCall,
    ShardingRule,
    Strategy,
    logical_shape,
)
from rankless.compiler.tracing.symbolic_sizes import size_hint
from rankless.parallel.tensor_placement import Shard

aten = torch.ops.aten
SUMS = {
    aten._log_softmax_backward_data.default: vocabulary_kernels.add_log_softmax_terms,
    aten._softmax_backward_data.default: vocabulary_kernels.add_softmax_terms,
}
GRADIENTS = {
    aten._log_softmax_backward_data.default: vocabulary_kernels.finish_log_softmax_gradient,
    aten._softmax_backward_data.default: vocabulary_kernels.finish_softmax_gradient,
}


def get_softmax_dim(call: OperatorCall) -> int:
    """Return the dim along which values are normalized, counted from the first."""
    count = len(logical_shape(call.inputs[0]))
    return int(call.argument("dim")) % max(count, 1)


def make_softmax_rule(choose_lowering: Any) -> ShardingRule:
    """Return the rule of a softmax or its gradient, from a function that returns a lowering for a sharded dim."""

    def rule(call: OperatorCall) -> Iterator[Strategy]:
        dim = get_softmax_dim(call)
        text = make_letters(len(logical_shape(call.inputs[0])), [dim])
        yield from split_strategies(call, ",".join([text] * len(call.inputs)) + f"->{text}")
        tried: list[Shard] = []
        for placement in call.current_placements:
            if isinstance(placement, Shard) and placement.dim == dim and placement not in tried:
                tried.append(placement)
                inputs = (placement,) * len(call.inputs)
                yield Strategy(inputs, (placement,), choose_lowering(), joins_pieces=True)

    return rule


def count_row_bytes(call: OperatorCall, dtype: torch.dtype) -> int:
    """Return the size of one number for each row."""
    shape = logical_shape(call.inputs[0])
    dim = get_softmax_dim(call)
    return int(size_hint(prod(shape[:dim] + shape[dim + 1 :])) * dtype.itemsize)


def make_softmax_lowering() -> LoweringRule:
    """Return a lowering to local maxima and sums; one for each call, because a gather runs along one axis."""

    def lower(builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> LocalValue:
        x, dim, result = args[0], get_softmax_dim(call), call.node.meta["val"].dtype
        given = call.inputs[0].meta["val"].dtype
        wide = ACCUMULATED_IN.get(result, result)
        maxima = builder.call(vocabulary_kernels.find_maxima, x, dim)
        gathered = builder.all_gather(maxima, "maxima of softmax", count_row_bytes(call, given))
        shifted = builder.call(vocabulary_kernels.subtract_maxima, x, gathered, wide)
        sums = builder.call(vocabulary_kernels.add_exponentials, shifted, dim)
        total = builder.all_reduce(sums, "sums of softmax", count_row_bytes(call, wide))
        if call.operator is aten._log_softmax.default:
            return builder.call(vocabulary_kernels.finish_log_softmax, shifted, total, result)
        if call.operator is aten._softmax.default:
            return builder.call(vocabulary_kernels.finish_softmax, shifted, total, result)
        return builder.call(vocabulary_kernels.finish_safe_softmax, shifted, total, gathered, result)

    return lower


def lower_softmax_gradient(
    builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], _kwargs: dict[str, Any]
) -> LocalValue:
    """Lower to local sums, one all-reduce, and local gradients."""
    grad, output = args[:2]
    given = call.inputs[1].meta["val"].dtype
    sums = builder.call(SUMS[call.operator], grad, output, get_softmax_dim(call))
    size = count_row_bytes(call, ACCUMULATED_IN.get(given, given))
    total = builder.all_reduce(sums, "sums of the gradient of softmax", size)
    return builder.call(GRADIENTS[call.operator], grad, output, total, call.node.meta["val"].dtype)


RULES: dict[Any, ShardingRule] = {
    **dict.fromkeys(
        (aten._softmax.default, aten._safe_softmax.default, aten._log_softmax.default),
        make_softmax_rule(make_softmax_lowering),
    ),
    **dict.fromkeys(
        (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default),
        make_softmax_rule(lambda: lower_softmax_gradient),
    ),
}

"""Sums over all ranks in half precision: they are in float32 and rounded once, as PyTorch's kernels accumulate.

Gradients are the exception: they are reduced together in their own dtype, as in DistributedDataParallel.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from rankless.compiler.rules.strategy import (
    GraphBuilder,
    LocalValue,
    LoweringRule,
    OperatorCall,
    ShardingRule,
    Strategy,
)
from rankless.compiler.tracing.symbolic_sizes import size_hint
from rankless.parallel.tensor_placement import Partial, Replicate, Shard

aten = torch.ops.aten
ACCUMULATED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""The dtype in which PyTorch's kernels accumulate sums of another dtype."""


def lower_wide_product(
    builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> LocalValue:
    """Lower an operator whose results are terms of a sum over all ranks: compute and add them in float32."""
    wide = ACCUMULATED_IN[call.node.meta["val"].dtype]
    terms = [builder.call(aten.to.dtype, item, wide) if isinstance(item, fx.Node) else item for item in args]
    return add_in_float32(builder, call, builder.call(call.operator, *terms, **kwargs))


def add_in_float32(builder: GraphBuilder, call: OperatorCall, term: fx.Node) -> LocalValue:
    """Add the ranks' terms of a sum, which are in float32, and round the sum to the dtype of the call's result."""
    value = call.node.meta["val"]
    size = int(size_hint(value.numel()) * ACCUMULATED_IN[value.dtype].itemsize)
    return builder.call(aten.to.dtype, builder.all_reduce(term, "sum in half precision", size), value.dtype)


def widen_sums(rule: ShardingRule, lower: LoweringRule = lower_wide_product) -> ShardingRule:
    """Return a rule that lowers partial sums in half precision by `lower`, to whole sums.

    The terms may be too large for half precision, and each would be rounded before it is added. A strategy without
    sharded inputs divides no sum: its inputs are partial sums already, and their terms are rounded.
    """

    def strategies(call: OperatorCall) -> Iterator[Strategy]:
        is_half = call.node.meta["val"].dtype in ACCUMULATED_IN and not call.node.meta.get("backward")
        for strategy in rule(call):
            is_sum = any(isinstance(placement, Partial) for placement in strategy.outputs)
            divides_sum = any(isinstance(placement, Shard) for placement in strategy.inputs)
            if is_half and is_sum and divides_sum:
                yield Strategy(strategy.inputs, (Replicate(),), lower)
            else:
                yield strategy

    return strategies

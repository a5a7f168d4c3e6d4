"""Rules for elementwise operators, with broadcasting."""

from collections.abc import Iterator
from typing import Any

import torch

from rankless.compiler.rules.pattern import LETTERS, partial_sum_strategies, split_strategies
from rankless.compiler.rules.strategy import OperatorCall, ShardingRule, Strategy, logical_shape
from rankless.parallel.tensor_placement import Partial, Replicate

aten = torch.ops.aten

UNTAGGED_POINTWISE = {
    aten.clone.default,
    aten._to_copy.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.masked_fill.Tensor,
    aten.masked_fill.Scalar,
    aten.where.self,
    aten.elu_backward.default,
    aten.hardtanh_backward.default,
    aten.leaky_relu_backward.default,
    aten.softplus_backward.default,
    aten.log_sigmoid_backward.default,
    aten._prelu_kernel.default,
    aten._prelu_kernel_backward.default,
    aten.mish_backward.default,
    aten.hardswish.default,
    aten.hardswish_backward.default,
    aten.hardsigmoid_backward.default,
    aten.hardshrink_backward.default,
    aten.softshrink_backward.default,
    aten.floor_divide.default,
    aten.floor_divide.Scalar,
    aten.rsub.Tensor,
    aten.copy.default,
    aten.zero.default,
    aten.fill.Scalar,
    aten.fill.Tensor,
    aten.complex.default,
    aten.polar.default,
    aten.isin.Tensor_Scalar,
    aten._standard_gamma_grad.default,
}
"""Pointwise operators that PyTorch does not tag as such."""

FLOAT8 = {
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize == 1
}
"""Types that PyTorch does not promote. A sum of their roundings is not the rounding of a sum."""

LINEAR_IN_BOTH = {aten.add.Tensor, aten.sub.Tensor}
LINEAR_IN_EACH = {aten.mul.Tensor}
LINEAR_IN_FIRST = {
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.neg.default,
    aten.clone.default,
}
SHAPE_ONLY = {
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.zero.default,
    aten.fill.Scalar,
}
"""Operators that read no values: for a partial sum they return the final value and not a term of it."""


def broadcast_pattern(call: OperatorCall) -> str:
    """Return one letter per dim of the output; a broadcast dim of size one is replicated."""
    (shape, *_) = call.output_shapes
    out = "".join("." if size == 1 else LETTERS[dim] for dim, size in enumerate(shape))
    texts = []
    for node in call.slots:
        if node is None:
            texts.append("")
            continue
        sizes = logical_shape(node)
        offset = len(shape) - len(sizes)
        texts.append("".join(out[offset + dim] if size != 1 else "." for dim, size in enumerate(sizes)))
    return ",".join(texts) + "->" + ",".join([out] * len(call.output_shapes))


def pointwise_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield sharding on any dim, and partial sums where the operator is linear."""
    yield from split_strategies(call, broadcast_pattern(call))
    if call.operator in SHAPE_ONLY and isinstance(call.current_placements[0], Partial):
        yield Strategy(call.current_placements, (Replicate(),))
    elif call.operator in LINEAR_IN_BOTH and len(call.inputs) == 2:
        yield from partial_sum_strategies(call, (0, 1))
    elif call.operator in LINEAR_IN_EACH:
        yield from partial_sum_strategies(call, *((position,) for position in range(len(call.inputs))))
    elif (call.operator in LINEAR_IN_FIRST and call.slots[0] is not None) or is_widening(call):
        yield from partial_sum_strategies(call, (0,))


def is_widening(call: OperatorCall) -> bool:
    """Return whether a call only changes the dtype, to a floating one that is no narrower."""
    if call.operator is not aten._to_copy.default:
        return False
    before, after = call.inputs[0].meta["val"].dtype, call.node.meta["val"].dtype
    if not after.is_floating_point or FLOAT8 & {before, after}:
        return bool(before == after)
    return not before.is_floating_point or torch.promote_types(before, after) == after


def is_pointwise(operator: torch._ops.OpOverload) -> bool:
    """Return whether an operator is elementwise."""
    return operator in UNTAGGED_POINTWISE or (
        torch.Tag.pointwise in operator.tags and torch.Tag.nondeterministic_seeded not in operator.tags
    )


def log_sigmoid_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies if the second output, a buffer, has the input's shape (CPU); on CUDA it is empty."""
    if call.output_shapes[0] == call.output_shapes[1]:
        yield from split_strategies(call, broadcast_pattern(call))


def new_tensor_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield the strategy of a new tensor of its own size: the input gives only dtype and device, in any placement."""
    yield Strategy(call.current_placements, (Replicate(),))


def zero_tangent_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield the strategy of zeros like a tangent, the second input: forward mode makes them, and reads no values."""
    (shape,), tangent = call.output_shapes, call.current_placements[-1]
    if shape == logical_shape(call.inputs[-1]):
        yield Strategy(call.current_placements, (Replicate() if isinstance(tangent, Partial) else tangent,))


RULES: dict[Any, ShardingRule] = {
    aten._new_zeros_with_same_feature_meta.default: zero_tangent_strategies,
    aten.log_sigmoid_forward.default: log_sigmoid_strategies,
    aten.new_zeros.default: new_tensor_strategies,
    aten.new_ones.default: new_tensor_strategies,
    aten.new_full.default: new_tensor_strategies,
    aten.new_empty.default: new_tensor_strategies,
    aten.new_empty_strided.default: new_tensor_strategies,
}

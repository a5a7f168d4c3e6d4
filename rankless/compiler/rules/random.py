"""Rules for random operators: every rank draws the logical value in the script's order and keeps its part.

The numbers therefore equal those of the plain script bit for bit, and the generators of all ranks stay equal.
"""

from collections.abc import Iterator
from typing import Any

import torch

from rankless.compiler.ir import local_kernels
from rankless.compiler.rules.strategy import GraphBuilder, LocalValue, OperatorCall, ShardingRule, Strategy
from rankless.parallel.tensor_placement import Placement, Replicate, Shard

aten = torch.ops.aten


def get_local_slice(builder: GraphBuilder, placement: Placement) -> tuple[int, int, int] | None:
    """Return the (dim, start, length) of a rank's part, or None for a replicated value."""
    if not isinstance(placement, Shard):
        return None
    return placement.dim, placement.start(builder.rank), placement.lengths[builder.rank]


def get_memory_layout(call: OperatorCall, index: int = 0) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Return logical shape, strides and dtype of an input; random numbers follow its memory order."""
    value = call.inputs[index].meta["val"]
    return tuple(value.shape), tuple(value.stride()), value.dtype


def like_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield the strategy of operators that read only the shape of their input, in any placement."""
    placement = call.current_placements[0]
    local_placement: Placement = placement if isinstance(placement, Shard) else Replicate()

    def lower(builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LocalValue:
        device = call.inputs[0].meta["val"].device
        arguments = tuple(args[1:])
        if kwargs.get("dtype") is not None:
            shape, strides, _ = get_memory_layout(call)
            layout = (shape, strides, kwargs["dtype"])
        else:
            layout = get_memory_layout(call)
        return builder.call(
            local_kernels.draw_and_slice,
            call.operator,
            layout,
            device,
            arguments,
            get_local_slice(builder, local_placement),
        )

    yield Strategy((local_placement,), (local_placement,), lower)


def dropout_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield the strategy of dropout with its mask; see `local_kernels.draw_dropout_mask`."""
    if call.argument("train") is False:
        return
    placement = call.current_placements[0]
    local_placement: Placement = placement if isinstance(placement, Shard) else Replicate()

    def lower(builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> LocalValue:
        device = call.inputs[0].meta["val"].device
        probability = call.argument("p")
        mask = builder.call(
            local_kernels.draw_dropout_mask,
            get_memory_layout(call),
            device,
            probability,
            get_local_slice(builder, local_placement),
        )
        return builder.call(local_kernels.apply_dropout, args[0], mask, probability), mask

    yield Strategy((local_placement,), (local_placement, local_placement), lower)


def replicated_only(_call: OperatorCall) -> Iterator[Strategy]:
    """Yield nothing: these operators read values or draw a new tensor, and run replicated from equal generators."""
    return iter(())


RULES: dict[Any, ShardingRule] = {
    aten.native_dropout.default: dropout_strategies,
    **dict.fromkeys(
        (
            aten.bernoulli.p,
            aten.rand_like.default,
            aten.randn_like.default,
            aten.randint_like.default,
            aten.randint_like.low_dtype,
            aten.uniform.default,
            aten.normal_functional.default,
            aten.exponential.default,
            aten.geometric.default,
            aten.cauchy.default,
            aten.log_normal.default,
            aten.random.default,
            aten.random.to,
        ),
        like_strategies,
    ),
    **dict.fromkeys(
        (
            aten.rand.default,
            aten.randn.default,
            aten.randint.default,
            aten.randint.low,
            aten.randperm.default,
            aten.normal.float_float,
            aten.bernoulli.default,
            aten.multinomial.default,
            aten.normal.Tensor_float,
            aten.normal.float_Tensor,
            aten.normal.Tensor_Tensor,
            aten.poisson.default,
        ),
        replicated_only,
    ),
}

"""Rules for random operators: every rank draws the logical value in the script's order and keeps its part.

The numbers therefore equal those of the plain script bit for bit, and the generators of all ranks stay equal. In a job
that draws by counter, each rank draws only its part (see `rankless.compiler.ir.counter_distributions`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rankless.compiler.ir import counter_distributions, counter_operators, local_kernels
from rankless.compiler.ir.logical_program import LogicalValue, draws_by_counter
from rankless.compiler.ir.memory_order import find_memory_order
from rankless.compiler.rules.strategy import GraphBuilder, LocalValue, OperatorCall, ShardingRule, Strategy
from rankless.compiler.tracing.symbolic_sizes import size_hint
from rankless.parallel.tensor_placement import Placement, Replicate, Shard, Sharding

aten = torch.ops.aten


def get_memory_layout(call: OperatorCall) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Return logical shape, strides and dtype of the first input; random numbers follow its memory order."""
    value = call.inputs[0].meta["val"]
    return tuple(value.shape), tuple(value.stride()), value.dtype


@dataclass(frozen=True)
class CounterDraw:
    """A draw by counter whose key is in the program."""

    add: Callable[[Sharding], fx.Node]
    """Adds the draw of this rank's part of the value."""
    is_whole: bool
    """Whether its parameters are whole tensors, so that only the whole value can be drawn."""


def get_logical_order(value: LogicalValue) -> tuple[int, ...] | None:
    """Return the order of a value's dims in memory."""
    sizes, strides = ([int(size_hint(item)) for item in items] for items in (value.shape, value.strides))
    return find_memory_order(sizes, strides)


def lower_counter_draw(
    builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> CounterDraw:
    """Add the key of a draw by counter, and return what adds the draw itself."""
    value: LogicalValue = call.node.meta["val"]
    reader = counter_operators.find_reader(call.operator)
    assert reader is not None, call.operator
    found = counter_operators.bind_arguments(call.operator, args, kwargs)
    drawn = reader(found, value.dtype)
    key = builder.call(counter_distributions.draw_key, value.shape)

    def draw(sharding: Sharding) -> fx.Node:
        return builder.call(
            counter_distributions.draw,
            key,
            drawn.distribution,
            drawn.parameters,
            (value.shape, value.dtype, value.device),
            builder.list_parts(sharding),
            get_logical_order(value),
        )

    return CounterDraw(draw, any(isinstance(item, fx.Node) for item in drawn.parameters))


def like_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield the strategy of operators that read only the shape of their input, in any placement."""
    placement = call.current_placements[0]
    local_placement: Placement = placement if isinstance(placement, Shard) else Replicate()
    if draws_by_counter(call.node) and not isinstance(placement, Shard):
        return  # what is replicated is drawn in the placement of each use
    yield Strategy((local_placement,), (local_placement,), lower_draw)


def lower_draw(builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LocalValue:
    """Draw this rank's part of the output."""
    if draws_by_counter(call.node):
        return lower_counter_draw(builder, call, args, kwargs).add(builder.output_sharding(0))
    device = call.inputs[0].meta["val"].device
    shape, strides, dtype = get_memory_layout(call)
    layout = (shape, strides, dtype if kwargs.get("dtype") is None else kwargs["dtype"])
    return builder.call(
        local_kernels.draw_and_slice,
        call.operator,
        layout,
        device,
        tuple(args[1:]),
        builder.list_parts(builder.output_sharding(0)),
    )


def dropout_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield the strategy of dropout with its mask; see `local_kernels.draw_dropout_mask`."""
    if call.argument("train") is False:
        return
    placement = call.current_placements[0]
    local_placement: Placement = placement if isinstance(placement, Shard) else Replicate()
    yield Strategy((local_placement,), (local_placement, local_placement), lower_dropout)


def lower_dropout(
    builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], _kwargs: dict[str, Any]
) -> LocalValue:
    """Draw this rank's part of the mask, and apply it."""
    device, probability, parts = (
        call.inputs[0].meta["val"].device,
        call.argument("p"),
        builder.list_parts(builder.output_sharding(0)),
    )
    if draws_by_counter(call.node):
        logical: LogicalValue = call.node.meta["val"][1]
        key = builder.call(counter_operators.draw_mask_key, logical.shape, probability)
        value, order = (logical.shape, logical.device), get_logical_order(logical)
        mask = builder.call(counter_operators.draw_mask, key, probability, value, parts, order)
    else:
        mask = builder.call(local_kernels.draw_dropout_mask, get_memory_layout(call), device, probability, parts)
    return builder.call(local_kernels.apply_dropout, args[0], mask, probability), mask


def probability_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield the strategies of an operator whose input has the parameters of its elements."""
    if draws_by_counter(call.node):
        yield from like_strategies(call)


def replicated_only(_call: OperatorCall) -> Iterator[Strategy]:
    """Yield nothing: these operators read values or draw a new tensor, and run replicated from equal generators."""
    return iter(())


RULES: dict[Any, ShardingRule] = {
    aten.native_dropout.default: dropout_strategies,
    aten.bernoulli.default: probability_strategies,
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
            aten.multinomial.default,
            aten.normal.Tensor_float,
            aten.normal.float_Tensor,
            aten.normal.Tensor_Tensor,
            aten.poisson.default,
        ),
        replicated_only,
    ),
}

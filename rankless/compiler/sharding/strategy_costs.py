"""What a strategy sends, and the one of several that sends the fewest bytes."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from torch import fx

from rankless.compiler.ir.logical_program import LogicalValue
from rankless.compiler.rules.strategy import OperatorCall, Strategy, make_replicated_strategy
from rankless.compiler.sharding.redistribute import estimate_cost
from rankless.compiler.tracing.symbolic_sizes import size_hint
from rankless.parallel.tensor_placement import BlockedShard, Partial, Placement, Replicate, Shard


def find_cheapest(
    strategies: Sequence[Strategy], call: OperatorCall, available: Mapping[fx.Node, list[Placement]]
) -> Strategy:
    """Return the strategy that sends the fewest bytes, and of those the one that takes the fewest sums as terms."""
    replicated_strategy = make_replicated_strategy(call)
    best, best_cost = None, (inf, 0)
    for strategy in strategies:
        sent_bytes = estimate_input_cost(strategy, call, available)
        if sent_bytes > 0 and strategy != replicated_strategy:
            # A partial sum that needs a redistribution first must still be reduced, so count that too. A partial sum
            # without one is what an expert would choose.
            sent_bytes += sum(
                value_bytes(value)
                for value, placement in zip(list_outputs(call), strategy.outputs, strict=True)
                if isinstance(placement, Partial)
            )
        elif sent_bytes > 0:
            sent_bytes += sum(value_bytes(value) for value in list_outputs(call))
        if call.wanted is not None:
            sent_bytes += estimate_cost(
                value_bytes(list_outputs(call)[0]), strategy.outputs[0], call.wanted, call.ranks
            )
        sent_bytes += strategy.sent_bytes
        cost = sent_bytes, count_summed_again(strategy, call, available)
        if cost < best_cost:
            best, best_cost = strategy, cost
    assert best is not None
    return best


def count_summed_again(strategy: Strategy, call: OperatorCall, available: Mapping[fx.Node, list[Placement]]) -> int:
    """Return the number of inputs that a strategy takes as terms of a sum, although they have been summed before.

    What follows from terms must be summed too. It costs as much to compute as what follows from the sum.
    """
    return sum(
        isinstance(required, Partial) and Replicate() in available[value]
        for value, required in zip(call.inputs, strategy.inputs, strict=True)
    )


def estimate_input_cost(strategy: Strategy, call: OperatorCall, available: Mapping[fx.Node, list[Placement]]) -> float:
    """Return the bytes to send before a strategy can run.

    A divided value is not taken as a term of a sum, even if it has been gathered: all that follows would be whole then.
    """
    total = 0.0
    for value, required in zip(call.inputs, strategy.inputs, strict=True):
        if isinstance(required, Partial) and isinstance(call.placements[value], Shard | BlockedShard):
            return inf
        size = value_bytes(value.meta["val"])
        total += min(estimate_cost(size, placement, required, call.ranks) for placement in available[value])
    return total


def list_outputs(call: OperatorCall) -> tuple[Any, ...]:
    """Return the logical values of a call's outputs."""
    value = call.node.meta["val"]
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def value_bytes(value: Any) -> int:
    """Return the bytes of a logical value; zero for one that is absent."""
    return int(size_hint(value.numel()) * value.element_size()) if isinstance(value, LogicalValue) else 0

"""Values whose dims are reordered, of which a redistribution moves the original anyway.

A backward pass takes the transposes of what the forward pass has multiplied. If the forward pass has moved a value for
its product, the transpose of what it got is a view of memory that is there. To move the transpose again would send the
same bytes twice.
"""

from collections.abc import Iterator, Mapping, Sequence

from torch import fx

from rankless.compiler.rule_table import find_rule
from rankless.compiler.rules.strategy import OperatorCall, Strategy, make_call, make_replicated_strategy
from rankless.compiler.rules.views import REORDERINGS
from rankless.parallel.tensor_placement import BlockedShard, Placement, Replicate, Shard, Sharding


def list_other_strategies(
    call: OperatorCall, chosen: Strategy, available: Mapping[fx.Node, Sequence[Placement]]
) -> list[Strategy]:
    """Return the strategies of a reordering for the other placements in which its input is available.

    Args:
        call: An operator.
        chosen: Its strategy.
        available: The placements of values.
    """
    if call.operator not in REORDERINGS:
        return []
    (value,) = call.inputs
    others = [placement for placement in available[value] if (placement,) != chosen.inputs]
    return [item for place in others for item in list_strategies(make_call(call.node, {value: place}, call.ranks))]


def list_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield the strategies of a call that take its input as it is, and that run the operator itself."""
    if isinstance(call.current_placements[0], Replicate):
        yield make_replicated_strategy(call)
        return
    rule = find_rule(call.operator)
    assert rule is not None, call.operator
    for strategy in rule(call):
        if strategy.inputs == call.current_placements and strategy.lower is None:
            yield strategy


def find_original(
    target: Sharding,
    chosen: Sequence[Strategy],
    others: Sequence[Sequence[Strategy]],
    available: Mapping[Sharding, fx.Node],
) -> fx.Node | None:
    """Return the local value of a reordering's input that gives its output in a sharding; None if there is none.

    Along one axis the sharding may be that of another strategy than the chosen one. No other axis divides the same dims
    then: the lengths of an axis hold for the pieces that those before it leave.

    Args:
        target: The sharding of the output.
        chosen: The operator's strategy along each axis.
        others: Its other strategies along each axis.
        available: The local values of the input, by sharding.
    """
    different = [number for number, strategy in enumerate(chosen) if strategy.outputs[0] != target[number]]
    if len(different) != 1:
        return None
    (number,) = different
    for strategy in others[number]:
        if strategy.outputs[0] != target[number]:
            continue
        inputs = tuple(strategy.inputs[0] if place == number else item.inputs[0] for place, item in enumerate(chosen))
        outputs = tuple(item.outputs[0] for item in chosen)
        if inputs in available and not any(shares_dims(item, number) for item in (inputs, outputs, target)):
            return available[inputs]
    return None


def shares_dims(sharding: Sharding, number: int) -> bool:
    """Return whether another axis divides the same dim as that with this number."""
    own = sharding[number]
    if not isinstance(own, Shard | BlockedShard):
        return False
    return any(
        isinstance(item, Shard | BlockedShard) and item.dim == own.dim
        for place, item in enumerate(sharding)
        if place != number
    )

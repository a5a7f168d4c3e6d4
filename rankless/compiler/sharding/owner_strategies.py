"""Strategies of operators on values that one rank has; see `tensor_placement`, Note [values on one rank].

Any operator can run on the rank that has one of its inputs, if it gets the others there too. An operator that is linear
in such an input can also take it as a term of a sum, of which the other ranks have zeros. So the results of experts on
different ranks are added, or stacked, without moving them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import fx

from rankless.compiler.ir.logical_program import draws_by_counter
from rankless.compiler.rules.random import dropout_strategies, lower_dropout
from rankless.compiler.rules.strategy import OperatorCall, ShardingRule, Strategy
from rankless.parallel.tensor_placement import OnRank, Partial, Placement, Shard

aten = torch.ops.aten


def list_strategies(call: OperatorCall, rule: ShardingRule) -> list[Strategy]:
    """Return the strategies of a call by the rule of its operator, with those for values that single ranks have.

    Of those that send as much, the first is the best. An input that several experts use is moved to them. Any other
    work is shared by all ranks, if it can be, or one rank does it, rather than all computing terms of a sum.

    Args:
        call: The call.
        rule: The rule of its operator.
    """
    current = [item for item in call.current_placements if isinstance(item, OnRank)]
    owners = list(dict.fromkeys([*current, *([call.wanted] if isinstance(call.wanted, OnRank) else [])]))
    alone = [strategy for owner in owners for strategy in run_on(owner, call)]
    if not current:
        return [*alone, *rule(call)]
    as_terms = replace(call, placements=dict(zip(call.inputs, read_as_terms(call.current_placements), strict=True)))
    others = list(rule(as_terms))
    shared = [item for item in others if any(isinstance(placement, Shard) for placement in item.outputs)]
    terms = [item for item in others if item not in shared]
    return [*alone, *shared, *terms] if meets_experts(call) else [*shared, *alone, *terms]


def no_strategies(_call: OperatorCall) -> Iterator[Strategy]:
    """Yield nothing: the rule of an operator that nothing is known of."""
    return iter(())


def meets_experts(call: OperatorCall) -> bool:
    """Return whether several operators take an input of a call together with values of single ranks."""
    divided = [
        value
        for value, placement in zip(call.inputs, call.current_placements, strict=True)
        if not isinstance(placement, OnRank)
    ]

    def counts(user: fx.Node) -> bool:
        return any(isinstance(call.placements.get(value), OnRank) for value in user.all_input_nodes)

    return any(sum(map(counts, value.users)) > 1 for value in divided)


def read_as_terms(placements: Sequence[Placement]) -> list[Placement]:
    """Return placements with what one rank has as terms of a sum, as which every rule knows it."""
    return [Partial() if isinstance(item, OnRank) else item for item in placements]


def run_on(owner: OnRank, call: OperatorCall) -> Iterator[Strategy]:
    """Yield the strategy of a call that runs on one rank; nothing for one that draws random numbers in its own way."""
    inputs, outputs = (owner,) * len(call.inputs), (owner,) * len(call.output_shapes)
    if torch.Tag.nondeterministic_seeded not in call.operator.tags:
        yield Strategy(inputs, outputs)
    elif call.operator is aten.native_dropout.default and call.output_shapes[0] and list(dropout_strategies(call)):
        yield Strategy(inputs, outputs, lower_dropout)


def runs_everywhere(node: fx.Node) -> bool:
    """Return whether every rank runs an operator, also those without its values: their generators advance too."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) or draws_by_counter(node)

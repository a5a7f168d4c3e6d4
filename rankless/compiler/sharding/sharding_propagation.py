"""Propagate shardings: along each axis, give every value of a program a placement and every operator a strategy.

The pass is greedy, in program order: of an operator's strategies it takes the one that sends the fewest bytes. With
replicated parameters and a sharded batch (data parallelism), the result matches an expert's program: one reduction per
gradient and per count.

Note [several axes]: the pass runs once per axis, from the outermost. Rules know one axis and logical shapes. A strategy
without a lowering of its own is right whatever other axes do, because it runs the operator on the local values. Two
strategies with lowerings combine only if they have the same one (see `GraphBuilder`). If an outer axis divides the same
dim of a value, the lengths of an inner axis hold for the pieces that the outer one leaves, so no other value may get
them. A strategy that does not combine is left out, and the inner axis may compute the operator on whole values. Choices
do not depend on the lengths that one worker has, so all workers make the same ones.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import inf
from operator import getitem
from typing import Any

import torch
from torch import fx

from rankless.compiler.expert_parallel import join_sums_of_experts, list_strategies, no_strategies
from rankless.compiler.ir.logical_program import LogicalProgram, LogicalValue, is_fresh
from rankless.compiler.probing.operator_probe import OperatorProbe
from rankless.compiler.rule_table import REFUSED_OPERATORS, find_rule
from rankless.compiler.rules.extension_operators import has_effects
from rankless.compiler.rules.pointwise import is_pointwise
from rankless.compiler.rules.strategy import OperatorCall, Strategy, make_call, make_replicated_strategy
from rankless.compiler.selected_rows.rules import list_for_counts, lower_equal_rows, takes_counts
from rankless.compiler.selected_rows.selections import find_selection
from rankless.compiler.sequence_parallel.rows_between_layers import find_divided_weights, find_rows
from rankless.compiler.sharding.redistribute import estimate_cost
from rankless.compiler.sharding.reordered_values import list_other_strategies
from rankless.compiler.tracing.symbolic_sizes import is_same, size_hint
from rankless.errors import CaptureError
from rankless.parallel.tensor_placement import (
    BlockedShard,
    OnRank,
    Partial,
    Placement,
    Replicate,
    Shard,
    Sharding,
    is_divided_along,
)

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class AxisSharding:
    """Along one axis, the placement of every value of a program and the strategy of every operator.

    `nodes_without_rule` run replicated: their inputs are gathered and their outputs split again. `probed_nodes` have no
    rule either, and are split as an experiment has shown to be right.
    """

    ranks: int
    placements: Mapping[fx.Node, Placement]
    strategies: Mapping[fx.Node, Strategy]
    nodes_without_rule: tuple[fx.Node, ...]
    probed_nodes: tuple[fx.Node, ...]
    reordered: Mapping[fx.Node, Sequence[Strategy]] = field(default_factory=dict)
    """Further strategies of views of values that are redistributed; see `reordered_values`."""


@dataclass(frozen=True, kw_only=True)
class ShardedProgram:
    """A logical program with the sharding of every value and the strategies of every operator, one per axis."""

    logical: LogicalProgram
    axes: tuple[AxisSharding, ...]
    state_shardings: Mapping[str, Sharding] = field(default_factory=dict)
    """Those of parameters and buffers that the program takes, and whose gradients it returns, in pieces."""

    @property
    def operators(self) -> tuple[fx.Node, ...]:
        """The nodes that have strategies."""
        return tuple(self.axes[0].strategies)

    @property
    def nodes_without_rule(self) -> tuple[fx.Node, ...]:
        """Operators that run replicated along some axis because they have no rule."""
        return tuple(dict.fromkeys(node for axis in self.axes for node in axis.nodes_without_rule))

    @property
    def probed_nodes(self) -> tuple[fx.Node, ...]:
        """Operators without a rule that are split along some axis."""
        return tuple(dict.fromkeys(node for axis in self.axes for node in axis.probed_nodes))

    def sharding(self, node: fx.Node) -> Sharding:
        """Return the sharding of a value."""
        return tuple(axis.placements[node] for axis in self.axes)

    def find_state_sharding(self, name: str) -> Sharding:
        """Return the sharding of a parameter or buffer."""
        return self.state_shardings.get(name, (Replicate(),) * len(self.axes))

    def list_state_axes(self) -> list[int]:
        """Return the axes that divide parameters and buffers, by number."""
        return [
            number
            for number in range(len(self.axes))
            if any(not isinstance(sharding[number], Replicate) for sharding in self.state_shardings.values())
        ]

    def strategies(self, node: fx.Node) -> tuple[Strategy, ...]:
        """Return the strategies of an operator."""
        return tuple(axis.strategies[node] for axis in self.axes)

    def input_shardings(self, node: fx.Node) -> list[Sharding]:
        """Return the shardings in which an operator takes its tensor inputs."""
        return list(zip(*(strategy.inputs for strategy in self.strategies(node)), strict=True))

    def output_shardings(self, node: fx.Node) -> list[Sharding]:
        """Return the shardings of an operator's outputs."""
        return list(zip(*(strategy.outputs for strategy in self.strategies(node)), strict=True))


def propagate_shardings(
    program: LogicalProgram,
    argument_shardings: Sequence[Sharding],
    axis_sizes: Sequence[int],
    probe: OperatorProbe | None = None,
    state_shardings: Mapping[str, Sharding] | None = None,
) -> ShardedProgram:
    """Return the shardings of a program from those of the job's tensor arguments and states.

    Sums of the results of experts are reordered in the program.

    Args:
        program: The program.
        argument_shardings: The sharding of each tensor argument.
        axis_sizes: The number of ranks along each axis, from the outermost.
        probe: Probes operators without a rule for the outermost axis; that is collective. None leaves them whole.
        state_shardings: The shardings of parameters and buffers by name. All others are whole.
    """
    states = state_shardings or {}
    given = [
        place_inputs(
            program,
            [sharding[number] for sharding in argument_shardings],
            {name: sharding[number] for name, sharding in states.items()},
        )
        for number in range(len(axis_sizes))
    ]

    @cache
    def propagate_alone(number: int) -> AxisSharding:
        return propagate_along_axis(program, given[number], axis_sizes[number], None, ())

    dividing = [
        number
        for number in range(len(axis_sizes))
        if any(not isinstance(sharding[number], Replicate) for sharding in states.values())
    ]

    def list_inner(outer: int, node: fx.Node) -> list[Strategy]:
        return [propagate_alone(number).strategies[node] for number in dividing if number > outer]

    axes: list[AxisSharding] = []
    for number, ranks in enumerate(axis_sizes):
        own_probe = None if axes else probe
        divide = partial(propagate_along_axis, program, given[number], ranks, own_probe, axes)
        axis = divide(partial(list_inner, number))
        if join_sums_of_experts(program.graph, axis.placements):
            return propagate_shardings(program, argument_shardings, axis_sizes, probe, state_shardings)
        axes.append(axis)
    return ShardedProgram(logical=program, axes=tuple(axes), state_shardings=states)


def place_inputs(
    program: LogicalProgram, arguments: Sequence[Placement], states: Mapping[str, Placement]
) -> dict[fx.Node, Placement]:
    """Return the placements of a program's inputs along one axis.

    Args:
        program: The program.
        arguments: Those of the job's tensor arguments.
        states: Those of parameters and buffers by name. All others are whole.
    """
    return {
        node: arguments[described.index] if described.kind == "argument" else states.get(described.name, Replicate())
        for node, described in program.inputs.items()
    }


def no_inner_strategies(_node: fx.Node) -> Sequence[Strategy]:
    """Return nothing: there are no axes within the one that is being divided."""
    return ()


def propagate_along_axis(
    program: LogicalProgram,
    given: Mapping[fx.Node, Placement],
    ranks: int,
    probe: OperatorProbe | None,
    outer: Sequence[AxisSharding],
    list_inner: Callable[[fx.Node], Sequence[Strategy]] = no_inner_strategies,
) -> AxisSharding:
    """Return placements and strategies along an axis, from those of inputs and outer axes, and `OperatorCall.inner`."""
    placements: dict[fx.Node, Placement] = {}
    strategies: dict[fx.Node, Strategy] = {}
    available: dict[fx.Node, list[Placement]] = {}
    nodes_without_rule, probed_nodes = list[fx.Node](), list[fx.Node]()
    reordered: dict[fx.Node, Sequence[Strategy]] = {}
    weights = find_divided_weights(program, given)
    wanted = find_wanted_placements(program, given, weights)
    takes_rows = program.sequence_parallel and bool(weights)
    taken: dict[fx.Node, Placement] = {}  # in sequence parallelism rows of a sum for its terms, positions for heads
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        if node in program.inputs:
            placement = given[node]
        elif node.target is getitem:
            source, index = node.args
            placement = strategies[source].outputs[index]
        else:
            refuse_unshardable(node)
            call = replace(make_call(node, taken, ranks, wanted.get(node), len(outer)), inner=partial(list_inner, node))
            strategies[node], has_rule = choose_strategy(call, available, probe, outer, weights)
            strategy = strategies[node]
            if not has_rule:
                is_split = any(isinstance(item, Shard) for item in strategy.inputs)
                (probed_nodes if is_split else nodes_without_rule).append(node)
            add_available(available, call.inputs, strategy.inputs)
            reordered[node] = list_other_strategies(call, strategy, available)
            placement = strategy.outputs[0]
        placements[node] = placement
        rows = find_rows(node, placement, ranks, [axis.placements[node] for axis in outer]) if takes_rows else None
        taken[node] = rows or find_returned(node, strategies) or placement
        available[node] = [placement] if taken[node] is placement else [placement, taken[node]]
        available[node] += [item.outputs[0] for item in reordered.get(node, ())]
    return AxisSharding(
        ranks=ranks,
        placements=placements,
        strategies=strategies,
        nodes_without_rule=tuple(nodes_without_rule),
        probed_nodes=tuple(probed_nodes),
        reordered=reordered,
    )


def add_available(
    available: Mapping[fx.Node, list[Placement]], values: Sequence[fx.Node], placements: Sequence[Placement]
) -> None:
    """Note the placements in which values are available: a redistributed value may be used by later operators too."""
    for value, placement in zip(values, placements, strict=True):
        if placement not in available[value]:
            available[value].append(placement)


def find_returned(node: fx.Node, strategies: Mapping[fx.Node, Strategy]) -> Placement | None:
    """Return the placement in which later operators take an output of several; None for the one that is computed."""
    if node.target is not getitem:
        return None
    source, index = node.all_input_nodes[0], int(str(node.args[1]))
    known = strategies.get(source)
    return known.returned[index] if known is not None and known.returned else None


def refuse_unshardable(node: fx.Node) -> None:
    """Raise `CaptureError` for an operator that gives wrong results on shards."""
    if node.target in REFUSED_OPERATORS:
        raise CaptureError(
            expected="operators on values, not on memory",
            found=f"{node.target}: {REFUSED_OPERATORS[node.target]}",
            fix="use slicing, unfold or reshape instead",
            where=node.meta.get("line"),
        )


def choose_strategy(
    call: OperatorCall,
    available: Mapping[fx.Node, list[Placement]],
    probe: OperatorProbe | None,
    outer: Sequence[AxisSharding] = (),
    weights: Collection[fx.Node] = (),
) -> tuple[Strategy, bool]:
    """Return the strategy that sends the fewest bytes, and whether a rule covers the operator.

    It combines with those along the axes in `outer`. It gathers one of `weights` only if none else is possible.
    """
    rule = find_rule(call.operator)
    replicated_strategy = make_replicated_strategy(call)
    runs_once = has_effects(call.operator)
    is_whole = all(isinstance(placement, Replicate) for placement in call.current_placements)
    if takes_counts(call) and not runs_once:
        possible = [
            item
            for item in list_for_counts(call, partial(list_strategies, call, rule or no_strategies))
            if combines(item, call, outer)
        ]
        kept = [item for item in (*possible, replicated_strategy) if not gathers_weights(item, call, weights)]
        return find_cheapest(kept or [replicated_strategy], call, available), is_whole or rule is not None
    if call.slots and not call.inputs:
        return replicated_strategy, True  # numbers in place of its tensors, such as the conjugate of 1j
    if has_sparse_value(call) or (is_whole and rule is None):
        return replicated_strategy, is_whole or rule is not None
    has_rule = rule is not None
    if rule is None:
        rule = no_strategies if probe is None else probe.strategies
    strategies = [strategy for strategy in list_strategies(call, rule) if combines(strategy, call, outer)]
    if not runs_once:
        strategies.append(replicated_strategy)
    kept = [strategy for strategy in strategies if not gathers_weights(strategy, call, weights)]
    found = find_cheapest(kept or strategies, call, available)
    return found, has_rule or any(isinstance(placement, OnRank) for placement in found.outputs)


def gathers_weights(strategy: Strategy, call: OperatorCall, weights: Collection[fx.Node]) -> bool:
    """Return whether a strategy needs the whole of a divided parameter."""
    pairs = zip(call.inputs, strategy.inputs, strict=True)
    return any(value in weights and isinstance(required, Replicate) for value, required in pairs)


def combines(strategy: Strategy, call: OperatorCall, outer: Sequence[AxisSharding]) -> bool:
    """Return whether a strategy can run with those of other axes at once; see Note [several axes]."""
    others = [axis.strategies[call.node] for axis in outer]
    if strategy.lower is not None and not all(other.lower in (None, strategy.lower) for other in others):
        return False
    inputs = list(zip(strategy.inputs, *(other.inputs for other in others), strict=True))
    outputs = list(zip(strategy.outputs, *(other.outputs for other in others), strict=True))
    divided = [placements for placements in (*inputs, *outputs) if isinstance(placements[0], Shard | BlockedShard)]
    shared = {tuple(is_within(own, item) for item in others) for own, *others in divided}
    if len(shared) > 1 or any(is_within_blocks(own, item) for own, *others in divided for item in others):
        return False
    if strategy.lower is lower_equal_rows:
        return is_of_whole_mask(strategy.outputs[0], outer)
    if (strategy.returned or call.wanted in strategy.outputs) and not any(map(any, shared)):
        return True  # these lengths hold for whole values
    for node, current, (required, *around) in zip(call.inputs, call.current_placements, inputs, strict=True):
        if isinstance(required, BlockedShard) and current == required:
            return True
        if isinstance(required, Shard) and current == required:
            known = [axis.placements[node] for axis in outer]
            pairs = zip(known, around, strict=True)
            if all(
                before == after or not (is_divided_along(before, required.dim) or is_divided_along(after, required.dim))
                for before, after in pairs
            ):
                return True
    return not divided


def is_of_whole_mask(placement: Placement, outer: Sequence[AxisSharding]) -> bool:
    """Return whether selected rows are divided by a mask that no outer axis divides: their numbers are of the whole."""
    selection = find_selection(placement)
    return selection is not None and all(isinstance(axis.placements[selection.mask], Replicate) for axis in outer)


def is_within(inner: Placement, outer: Placement) -> bool:
    """Return whether the lengths of a placement hold for the pieces that an outer axis leaves.

    Those of blocks do not, if the outer axis divides between blocks.
    """
    if not isinstance(inner, Shard | BlockedShard) or not is_divided_along(outer, inner.dim):
        return False
    if isinstance(inner, BlockedShard) and isinstance(outer, Shard):
        return any(length % inner.block for length in outer.lengths)
    return True


def is_within_blocks(inner: Placement, outer: Placement) -> bool:
    """Return whether a placement would divide what is left of blocks, which no redistribution can."""
    is_blocked = isinstance(inner, BlockedShard) or isinstance(outer, BlockedShard)
    return is_blocked and is_within(inner, outer)


def has_sparse_value(call: OperatorCall) -> bool:
    """Return whether an operator takes or gives a sparse tensor, which has no pieces."""
    values = [*[node.meta["val"] for node in call.inputs], *call.outputs]
    return any(isinstance(value, LogicalValue) and value.is_sparse for value in values)


def find_wanted_placements(
    program: LogicalProgram, given: Mapping[fx.Node, Placement], weights: Mapping[fx.Node, Placement]
) -> dict[fx.Node, Placement]:
    """Return the placements in which values are wanted: gradients, the terms of them, and what meets an expert.

    Args:
        program: The program.
        given: The placements of its inputs along one axis.
        weights: Those of divided parameters, and of views of them.
    """
    found = dict(list_gradients(program, given))
    owners: dict[fx.Node, set[OnRank]] = {}
    for weight, placement in weights.items():
        if isinstance(placement, OnRank):
            for user in weight.users:
                for value in user.all_input_nodes:
                    owners.setdefault(value, set()).add(placement)
    pending = [(value, next(iter(ranks))) for value, ranks in owners.items() if len(ranks) == 1]
    while pending:
        value, owner = pending.pop()
        if value not in found:
            found[value] = owner
            pending += [(term, owner) for term in value.all_input_nodes if is_used_only_for(term, value)]
    return found


def is_used_only_for(term: fx.Node, value: fx.Node) -> bool:
    """Return whether a value is a view of another one, or is computed of it element by element, and nothing else is."""
    if not isinstance(value.target, torch._ops.OpOverload) or len(term.users) != 1 or term.op != "call_function":
        return False
    if len(value.all_input_nodes) == 1 and not is_fresh(value):
        return True
    shapes = [getattr(node.meta.get("val"), "shape", ()) for node in (term, value)]
    return is_pointwise(value.target) and is_same(shapes[0], shapes[1])


def list_gradients(program: LogicalProgram, given: Mapping[fx.Node, Placement]) -> Iterator[tuple[fx.Node, Placement]]:
    """Yield the gradients of divided parameters, and the terms of them, with the placements in which they are kept."""
    states = {described.name: given[node] for node, described in program.inputs.items()}
    found: set[fx.Node] = set()
    for node, described in program.outputs:
        placement = states.get(described.name)
        if described.kind != "gradient" or not isinstance(placement, Shard | OnRank):
            continue
        pending = [node]
        while pending:
            term = pending.pop()
            if term in found:
                continue
            found.add(term)
            yield term, placement
            if term.target in (aten.add.Tensor, aten._to_copy.default, aten.clone.default):
                pending += [
                    item for item in term.all_input_nodes if is_same(item.meta["val"].shape, term.meta["val"].shape)
                ]


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
                for value, placement in zip(call.outputs, strategy.outputs, strict=True)
                if isinstance(placement, Partial)
            )
        elif sent_bytes > 0:
            sent_bytes += sum(value_bytes(value) for value in call.outputs)
        if call.wanted is not None:
            sent_bytes += estimate_cost(value_bytes(call.outputs[0]), strategy.outputs[0], call.wanted, call.ranks)
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


def value_bytes(value: Any) -> int:
    """Return the bytes of a logical value; zero for one that is absent."""
    return int(size_hint(value.numel()) * value.element_size()) if isinstance(value, LogicalValue) else 0

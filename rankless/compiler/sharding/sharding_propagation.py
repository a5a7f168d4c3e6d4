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

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from operator import getitem

import torch
from torch import fx

from rankless.compiler.ir.logical_program import LogicalProgram, LogicalValue
from rankless.compiler.probing.operator_probe import OperatorProbe
from rankless.compiler.rules.extension_operators import has_effects
from rankless.compiler.rules.selected_rows import lower_equal_rows
from rankless.compiler.rules.strategy import OperatorCall, Strategy, make_call, make_replicated_strategy
from rankless.compiler.rules.table import REFUSED_OPERATORS, find_rule
from rankless.compiler.sharding.counted_rows import list_for_counts, takes_counts
from rankless.compiler.sharding.owner_strategies import list_strategies, no_strategies
from rankless.compiler.sharding.reordered_values import list_other_strategies
from rankless.compiler.sharding.sequence_parallelism import find_divided_weights, find_rows
from rankless.compiler.sharding.strategy_costs import find_cheapest, list_outputs
from rankless.compiler.sharding.sums_of_experts import join_sums_of_experts
from rankless.compiler.sharding.wanted_placements import find_wanted_placements
from rankless.compiler.tracing.row_selections import find_selection
from rankless.errors import CaptureError
from rankless.parallel.tensor_placement import (
    BlockedShard,
    OnRank,
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
        possible = [item for item in list_for_counts(call, rule) if combines(item, call, outer)]
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
    values = [*[node.meta["val"] for node in call.inputs], *list_outputs(call)]
    return any(isinstance(value, LogicalValue) and value.is_sparse for value in values)

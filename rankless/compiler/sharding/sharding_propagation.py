"""Propagate shardings: give every value of a logical program a placement and every operator a strategy.

The pass is greedy, in program order: of an operator's strategies it takes the one that sends the fewest bytes. With
replicated parameters and a sharded batch (data parallelism), the result matches an expert's program: one reduction per
gradient and per count.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from operator import getitem
from typing import Any

from torch import fx

from rankless.compiler.ir.logical_program import LogicalProgram, LogicalValue
from rankless.compiler.probing.operator_probe import OperatorProbe
from rankless.compiler.rules.strategy import OperatorCall, Strategy, make_call, make_replicated_strategy
from rankless.compiler.rules.table import REFUSED_OPERATORS, find_rule
from rankless.compiler.sharding.redistribute import estimate_cost
from rankless.compiler.tracing.symbolic_sizes import size_hint
from rankless.errors import CaptureError
from rankless.parallel.tensor_placement import Partial, Placement, Replicate, Shard


@dataclass(frozen=True, kw_only=True)
class ShardedProgram:
    """A logical program with the placement of every value and the strategy of every operator.

    `nodes_without_rule` run replicated: their inputs are gathered and their outputs split again. `probed_nodes` have no
    rule either, and are split as an experiment has shown to be right.
    """

    logical: LogicalProgram
    mesh_size: int
    placements: Mapping[fx.Node, Placement]
    strategies: Mapping[fx.Node, Strategy]
    nodes_without_rule: tuple[fx.Node, ...]
    probed_nodes: tuple[fx.Node, ...] = ()


def propagate_shardings(
    program: LogicalProgram,
    argument_placements: tuple[Placement, ...],
    mesh_size: int,
    probe: OperatorProbe | None = None,
) -> ShardedProgram:
    """Return placements for a mesh of `mesh_size` ranks, from those of the job's tensor arguments.

    All other inputs are replicated. Operators without a rule are probed, if there is a `probe`; that is collective.
    """
    placements: dict[fx.Node, Placement] = {}
    strategies: dict[fx.Node, Strategy] = {}
    # A redistributed value is available in both placements, and later operators may use either.
    available: dict[fx.Node, list[Placement]] = {}
    nodes_without_rule: list[fx.Node] = []
    probed_nodes: list[fx.Node] = []
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        if node in program.inputs:
            described = program.inputs[node]
            placement = argument_placements[described.index] if described.kind == "argument" else Replicate()
        elif node.target is getitem:
            source, index = node.args
            placement = strategies[source].outputs[index]
        else:
            refuse_unshardable(node)
            call = make_call(node, placements, mesh_size)
            strategy, has_rule = choose_strategy(call, available, probe)
            strategies[node] = strategy
            if not has_rule:
                is_split = any(isinstance(item, Shard) for item in strategy.inputs)
                (probed_nodes if is_split else nodes_without_rule).append(node)
            for value, required in zip(call.inputs, strategy.inputs, strict=True):
                if required not in available[value]:
                    available[value].append(required)
            placement = strategy.outputs[0]
        placements[node] = placement
        available[node] = [placement]
    return ShardedProgram(
        logical=program,
        mesh_size=mesh_size,
        placements=placements,
        strategies=strategies,
        nodes_without_rule=tuple(nodes_without_rule),
        probed_nodes=tuple(probed_nodes),
    )


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
    call: OperatorCall, available: Mapping[fx.Node, list[Placement]], probe: OperatorProbe | None
) -> tuple[Strategy, bool]:
    """Return the strategy that sends the fewest bytes, and whether a rule covers the operator."""
    rule = find_rule(call.operator)
    replicated_strategy = make_replicated_strategy(call)
    is_whole = all(isinstance(placement, Replicate) for placement in call.current_placements)
    if has_sparse_value(call) or (is_whole and rule is None):
        return replicated_strategy, is_whole
    if rule is None:
        rule = no_strategies if probe is None else probe.strategies
        return find_cheapest([*rule(call), replicated_strategy], call, available), False
    return find_cheapest([*rule(call), replicated_strategy], call, available), True


def no_strategies(_call: OperatorCall) -> Iterator[Strategy]:
    """Yield nothing: the rule of an operator that nothing is known of."""
    return iter(())


def find_cheapest(
    strategies: Sequence[Strategy], call: OperatorCall, available: Mapping[fx.Node, list[Placement]]
) -> Strategy:
    """Return the strategy that sends the fewest bytes; the last one is the replicated one."""
    replicated_strategy = strategies[-1]
    best, best_cost = None, inf
    for strategy in strategies:
        sent_bytes = estimate_input_cost(strategy, call, available)
        if sent_bytes > 0 and strategy is not replicated_strategy:
            # A partial sum that needs a redistribution first must still be reduced, so count that too. A partial sum
            # without one is what an expert would choose.
            sent_bytes += sum(
                value_bytes(value)
                for value, placement in zip(list_outputs(call), strategy.outputs, strict=True)
                if isinstance(placement, Partial)
            )
        elif sent_bytes > 0:
            sent_bytes += sum(value_bytes(value) for value in list_outputs(call))
        if sent_bytes < best_cost:
            best, best_cost = strategy, sent_bytes
    assert best is not None
    return best


def has_sparse_value(call: OperatorCall) -> bool:
    """Return whether an operator takes or gives a sparse tensor, which has no pieces."""
    values = [*[node.meta["val"] for node in call.inputs], *list_outputs(call)]
    return any(isinstance(value, LogicalValue) and value.is_sparse for value in values)


def estimate_input_cost(strategy: Strategy, call: OperatorCall, available: Mapping[fx.Node, list[Placement]]) -> float:
    """Return the bytes to send before a strategy can run."""
    total = 0.0
    for value, required in zip(call.inputs, strategy.inputs, strict=True):
        size = value_bytes(value.meta["val"])
        total += min(estimate_cost(size, placement, required, call.mesh_size) for placement in available[value])
    return total


def list_outputs(call: OperatorCall) -> tuple[Any, ...]:
    """Return the logical values of a call's outputs."""
    value = call.node.meta["val"]
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def value_bytes(value: Any) -> int:
    """Return the bytes of a logical value; zero for one that is absent."""
    return int(size_hint(value.numel()) * value.element_size()) if isinstance(value, LogicalValue) else 0

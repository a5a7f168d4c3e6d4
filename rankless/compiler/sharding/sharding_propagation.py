"""Place: every value of a logical program gets a placement, every operator a strategy.

Greedy, in program order: of the strategies open to an operator the one that moves the fewest bytes. With parameters
whole and the batch split (the data axis), that is an expert's program: one reduction per gradient and per count.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from operator import getitem
from typing import Any

from torch import fx

from rankless.compiler.ir.logical_program import LogicalProgram, LogicalValue
from rankless.compiler.rules.strategy import OperatorCall, Strategy, make_call, make_replicated_strategy
from rankless.compiler.rules.table import REFUSED_OPERATORS, find_rule
from rankless.compiler.sharding.redistribute import estimate_cost
from rankless.compiler.tracing.symbolic_sizes import size_hint
from rankless.errors import CaptureError
from rankless.parallel.placement import Partial, Placement, Replicate


@dataclass(frozen=True, kw_only=True)
class ShardedProgram:
    """A logical program with the placement of every value and the strategy of every operator.

    `ruleless` are the operators that no rule covers: gathered, computed whole, split again.
    """

    logical: LogicalProgram
    mesh_size: int
    placements: Mapping[fx.Node, Placement]
    strategies: Mapping[fx.Node, Strategy]
    nodes_without_rule: tuple[fx.Node, ...]


def propagate_shardings(program: LogicalProgram, arguments: tuple[Placement, ...], mesh_size: int) -> ShardedProgram:
    """Placements for a mesh of `mesh_size` ranks, given how the job's tensor arguments lie; the rest starts whole."""
    placements: dict[fx.Node, Placement] = {}
    strategies: dict[fx.Node, Strategy] = {}
    # Once moved, a value lies in both ways, and later operators may take either.
    available: dict[fx.Node, list[Placement]] = {}
    nodes_without_rule = []
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        if node in program.inputs:
            described = program.inputs[node]
            placement = arguments[described.index] if described.kind == "argument" else Replicate()
        elif node.target is getitem:
            source, index = node.args
            placement = strategies[source].outputs[index]
        else:
            refuse_unshardable(node)
            call = make_call(node, placements, mesh_size)
            strategy, covered = choose_strategy(call, available)
            strategies[node] = strategy
            if not covered:
                nodes_without_rule.append(node)
            for value, wanted in zip(call.inputs, strategy.inputs, strict=True):
                if wanted not in available[value]:
                    available[value].append(wanted)
            placement = strategy.outputs[0]
        placements[node] = placement
        available[node] = [placement]
    return ShardedProgram(
        logical=program,
        mesh_size=mesh_size,
        placements=placements,
        strategies=strategies,
        nodes_without_rule=tuple(nodes_without_rule),
    )


def refuse_unshardable(node: fx.Node) -> None:
    """Raise for an operator that would be wrong in parts."""
    if node.target in REFUSED_OPERATORS:
        raise CaptureError(
            expected="operators on values, not on memory",
            found=f"{node.target}: {REFUSED_OPERATORS[node.target]}",
            fix="use slicing, unfold or reshape instead",
            where=node.meta.get("line"),
        )


def choose_strategy(call: OperatorCall, available: Mapping[fx.Node, list[Placement]]) -> tuple[Strategy, bool]:
    """The strategy that moves the fewest bytes, and whether a rule covers the operator."""
    rule = find_rule(call.operator)
    whole = make_replicated_strategy(call)
    if rule is None:
        return whole, all(isinstance(placement, Replicate) for placement in call.current_placements)
    best, best_cost = None, inf
    for strategy in [*rule(call), whole]:
        moved = estimate_input_cost(strategy, call, available)
        if moved > 0 and strategy is not whole:
            # A partial sum that had to be paid for must still be reduced; one that came free is an expert's choice.
            moved += sum(
                value_bytes(value)
                for value, placement in zip(list_outputs(call), strategy.outputs, strict=True)
                if isinstance(placement, Partial)
            )
        elif moved > 0:
            moved += sum(value_bytes(value) for value in list_outputs(call))
        if moved < best_cost:
            best, best_cost = strategy, moved
    assert best is not None
    return best, True


def estimate_input_cost(strategy: Strategy, call: OperatorCall, available: Mapping[fx.Node, list[Placement]]) -> float:
    """Bytes that must move before a strategy can run."""
    total = 0.0
    for value, wanted in zip(call.inputs, strategy.inputs, strict=True):
        size = value_bytes(value.meta["val"])
        total += min(estimate_cost(size, placement, wanted, call.mesh_size) for placement in available[value])
    return total


def list_outputs(call: OperatorCall) -> tuple[Any, ...]:
    """The logical values that a call gives."""
    value = call.node.meta["val"]
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def value_bytes(value: Any) -> int:
    """Bytes of a logical value; nothing for one that is absent."""
    return int(size_hint(value.numel()) * value.element_size()) if isinstance(value, LogicalValue) else 0

"""Lower a sharded program to one rank's program on local values, with collectives where placements differ."""

from collections.abc import Sequence
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from rankless.compiler.expert_parallel import runs_everywhere
from rankless.compiler.ir import local_kernels
from rankless.compiler.ir.local_kernels import slice_blocks
from rankless.compiler.ir.logical_program import (
    LogicalValue,
    ProgramOutput,
    draws_by_counter,
    format_operator,
    format_value,
)
from rankless.compiler.lowering.local_graph import LocalGraph, LocalGraphBuilder, restore_layout
from rankless.compiler.lowering.phases import JointMove, ProgramPhase, join_moves, list_phases
from rankless.compiler.lowering.recomputation import choose_regions, count_own_bytes, gather_again, recompute
from rankless.compiler.lowering.value_check import ValueCheck
from rankless.compiler.rules.random import CounterDraw, lower_counter_draw
from rankless.compiler.rules.strategy import (
    GraphBuilder,
    LocalValue,
    get_operator,
    list_tensor_slots,
)
from rankless.compiler.selected_rows.local_counts import RowCounts
from rankless.compiler.sharding.redistribute import (
    CollectivePurpose,
    JointGather,
    Redistribution,
    count_bytes,
    estimate_costs,
    list_steps,
    replace_placement,
)
from rankless.compiler.sharding.reordered_values import find_original
from rankless.compiler.sharding.sharding_propagation import ShardedProgram
from rankless.parallel.mesh import Mesh, MeshAxis
from rankless.parallel.tensor_placement import (
    BlockedShard,
    OnRank,
    Partial,
    Placement,
    Replicate,
    Shard,
    Sharding,
    compute_local_shape,
    is_absent,
)

aten = torch.ops.aten


class LoweringPass(LocalGraphBuilder):
    """Lowers a program operator by operator."""

    def __init__(self, sharded: ShardedProgram, mesh: Mesh) -> None:
        super().__init__(sharded, mesh)
        self.values: dict[fx.Node, dict[Sharding, fx.Node]] = {}
        self.results: dict[fx.Node, LocalValue] = {}
        self.draws: dict[fx.Node, CounterDraw] = {}
        self.counts = RowCounts(self)
        self.checks: dict[fx.Node, list[ProgramOutput]] = {}
        for node, output in sharded.logical.outputs:
            if output.kind == "check":
                self.checks.setdefault(node, []).append(output)

    def lower_graph(self) -> LocalGraph:
        """Return the complete local graph."""
        logical = self.sharded.logical
        inputs = []
        for node in logical.graph.nodes:
            if node in logical.inputs:
                local = self.graph.placeholder(node.name)
                local.meta.update(described=logical.inputs[node].name, kind=logical.inputs[node].kind)
                self.values[node] = {self.sharded.sharding(node): local}
                inputs.append((local, logical.inputs[node]))
        for node in logical.inputs:
            self.add_checks(node)
        for phase in list_phases(self.sharded):
            self.add_moves(phase)
            for node in phase.nodes:
                self.lower_node(node)
                self.add_checks(node)
        self.counts.add_checks()
        outputs, pending_gradients = self.lower_outputs()
        self.graph.output(tuple(node for node, _ in outputs))
        return LocalGraph(
            graph=self.graph,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            pending_gradients=tuple(pending_gradients),
        )

    def add_moves(self, phase: ProgramPhase) -> None:
        """Add the moves that come before the operators of a phase; experts of all ranks get their samples at once."""
        for joint in join_moves(phase.moves, self.sharded, self.find_stage):
            self.add_joint_gather(joint)
        for node, value, sharding in phase.moves:
            self.current_node = node
            self.redistribute(value, sharding, f"input of {format_operator(node.target)}")

    def find_stage(self, _node: fx.Node) -> int:
        """Return the stage of an operator in a pipeline: 0 for all of a program without stages."""
        return 0

    def add_joint_gather(self, joint: JointMove) -> None:
        """Add one collective that brings several divided values to single ranks."""
        values = [value for _, value, _ in joint.moves]
        given = [self.sharded.sharding(value) for value in values]
        together = [replace_placement(sharding, joint.number, Replicate()) for sharding in given]
        if is_absent(together[0], self.ranks):
            return
        shapes = [
            compute_local_shape(value.meta["val"].shape, sharding, self.ranks)
            for value, sharding in zip(values, together, strict=True)
        ]
        self.current_node = joint.moves[0][0]
        found = self.add_collective(
            JointGather(self.axes[joint.number], [part.dim for part in joint.parts], joint.ranks),
            tuple(self.values[value][sharding] for value, sharding in zip(values, given, strict=True)),
            sum(map(count_bytes, values, shapes)),
            f"input of {format_operator(self.current_node.target)}",
            purpose="input",
            lengths=[part.lengths for part in joint.parts],
        )
        for place, (node, value, sharding) in enumerate(joint.moves):
            self.current_node = node
            moved = self.call(getitem, found, place)
            absent = is_absent(sharding, self.ranks)
            self.values[value][sharding] = moved if absent else restore_layout(self, moved, value.meta["val"])

    def add_checks(self, node: fx.Node) -> None:
        """Compare a value with what the job's Python has read of it, if it has, and counts of selected rows."""
        if not self.checks:  # else another program may be the right one
            self.counts.add_checks()
        for check in self.checks.get(node, ()):
            self.call(ValueCheck(check.index, check.expected), self.redistribute(node, self.whole, check.name))

    def lower_outputs(self) -> tuple[list[tuple[fx.Node, ProgramOutput]], list[fx.Node]]:
        """Replicate results and new buffers on every rank; leave gradients that are partial sums to the schedule.

        A gradient is divided like its parameter along the axes that divide this.
        """
        outputs, pending_gradients = [], []
        for node, described in self.sharded.logical.outputs:
            self.current_node = node
            name = described.name if described.kind == "result" else f"{described.kind} of {described.name}"
            target = self.whole
            if described.kind == "gradient":
                stored = self.sharded.find_state_sharding(described.name)
                target = tuple(map(place_gradient, self.sharded.sharding(node), stored))
            local = self.redistribute(node, target, name, purpose="output")
            summed = tuple(axis for axis, item in zip(self.axes, target, strict=True) if isinstance(item, Partial))
            if summed and local not in pending_gradients:
                pending_gradients.append(local)
                local.meta["summed_along"] = summed
            outputs.append((local, described))
        return outputs, pending_gradients

    def lower_node(self, node: fx.Node) -> None:
        """Add one operator, after the redistributions of its inputs."""
        self.current_node = node
        if node.target is getitem:
            (source,), index = node.all_input_nodes, int(str(node.args[1]))
            result = self.results[source]
            local = result[index] if isinstance(result, tuple) else self.call(getitem, result, index)
            assert local is not None, f"{source.target} has no output {index}"
            self.store(node, local, source)
            return
        inputs = [value for value in list_tensor_slots(node) if value is not None]
        for sharding in (*self.sharded.input_shardings(node), *self.sharded.output_shardings(node)):
            self.counts.note_divisions(sharding)
        local_inputs = [
            self.redistribute(value, required, f"input of {format_operator(node.target)}")
            for value, required in zip(inputs, self.sharded.input_shardings(node), strict=True)
        ]
        args, kwargs = replace_arguments(node, iter(local_inputs))
        has_lowering = any(strategy.lower is not None for strategy in self.sharded.strategies(node))
        if draws_by_counter(node) and not has_lowering and node.target is not aten.native_dropout.default:
            self.lower_counter_draw(node, args, kwargs)
            return
        result = self.apply_strategies(node, args, kwargs)
        self.results[node] = result
        if not isinstance(result, tuple):
            self.store(node, result, node)

    def lower_counter_draw(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Add the key of a draw by counter; each placement that is used adds the draw of this rank's part."""
        drawn = lower_counter_draw(self, self.make_call(node, 0), args, kwargs)
        self.values[node] = {}
        if drawn.is_whole:
            self.store(node, drawn.add(self.whole), node)
        else:
            self.draws[node] = drawn

    def add_counter_draw(self, node: fx.Node, target: Sharding) -> fx.Node:
        """Add the draw of this rank's part of a value, and describe it by its operator."""
        user, self.current_node = self.current_node, node
        local = self.draws[node].add(target)
        self.current_node = user
        local.meta["described"] = f"{format_value(node)} of {format_operator(node.target)}"
        local.meta["logical"] = node
        self.values[node][target] = local
        return local

    def store(self, node: fx.Node, local: fx.Node, computed_by: fx.Node) -> None:
        """Keep the local value of a logical one, and describe it by its operator."""
        local.meta.setdefault("described", f"{format_value(node)} of {format_operator(computed_by.target)}")
        local.meta.setdefault("logical", node)
        self.values[node] = {self.sharded.sharding(node): local}
        self.counts.define(node, local, self.sharded.sharding(node))

    def apply_strategies(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LocalValue:
        """Add the operator on local values as its strategies prescribe; see Note [several axes]."""
        if is_absent(self.output_sharding(0), self.ranks) and not runs_everywhere(node):
            return self.add_absent_results(node, pytree.arg_tree_leaves(*args, **kwargs))
        self.generator, self.start = node.meta.get("generator"), node.meta.get("start")
        lowerings = {
            number: strategy.lower
            for number, strategy in enumerate(self.sharded.strategies(node))
            if strategy.lower is not None
        }
        if not lowerings:
            result: LocalValue = self.call(get_operator(node), *args, **kwargs)
        else:
            self.current_axes = tuple(lowerings)
            (lower,) = set(lowerings.values())
            result = lower(self, self.make_call(node, self.current_axes[0]), args, kwargs)
            self.current_axes = ()
        self.generator = None
        return result

    def add_absent_results(self, node: fx.Node, inputs: Sequence[Any]) -> LocalValue:
        """Add what this rank holds in place of an operator's results, which another one has."""
        values = node.meta["val"]
        if not isinstance(values, tuple | list):
            return self.add_absent(values, self.output_sharding(0), inputs)
        return tuple(
            self.add_absent(value, self.output_sharding(index), inputs) if isinstance(value, LogicalValue) else None
            for index, value in enumerate(values)
        )

    def redistribute(
        self, node: fx.Node, target: Sharding, reason: str, *, purpose: CollectivePurpose = "input"
    ) -> fx.Node:
        """Return the local value in the target sharding; redistribute it at most once per sharding."""
        available = self.values[node]
        if target in available:
            return available[target]
        adds = any(isinstance(placement, Partial | BlockedShard) for placement in target)
        if node in self.draws and not (available and adds):
            if not adds:
                return self.add_counter_draw(node, target)
            self.add_counter_draw(node, self.whole)
        if (original := self.find_original(node, target)) is not None:
            return self.add_reordering(node, original, target)
        size = count_bytes(node)
        source = min(available, key=lambda sharding: estimate_costs(size, sharding, target, self.axes))
        for step in list_steps(source, target):
            if step not in available:
                available[step] = self.add_step(node, source, step, reason, purpose)
            source = step
        return available[target]

    def find_original(self, node: fx.Node, target: Sharding) -> fx.Node | None:
        """Return the local value of which a value in a sharding is a view; None if there is none, or no view."""
        others = [axis.reordered.get(node, ()) for axis in self.sharded.axes]
        if not any(others):
            return None
        return find_original(target, self.sharded.strategies(node), others, self.values[node.all_input_nodes[0]])

    def add_reordering(self, node: fx.Node, original: fx.Node, target: Sharding) -> fx.Node:
        """Add a view of another local value of an operator's input."""
        user, self.current_node = self.current_node, node
        args, kwargs = replace_arguments(node, iter([original]))
        local = self.call(get_operator(node), *args, **kwargs)
        self.current_node = user
        self.values[node][target] = local
        return local

    def add_step(
        self, node: fx.Node, source: Sharding, wanted: Sharding, reason: str, purpose: CollectivePurpose
    ) -> fx.Node:
        """Add the nodes that change the placement of a value along one axis."""
        ((number, before, after),) = (
            (number, *pair) for number, pair in enumerate(zip(source, wanted, strict=True)) if pair[0] != pair[1]
        )
        local, axis = self.values[node][source], self.axes[number]
        together = replace_placement(source, number, Replicate())
        if is_absent(together, self.ranks):
            return self.add_absent_step(node, source, wanted)
        shape = compute_local_shape(node.meta["val"].shape, together, self.ranks)
        self.counts.prepare_move(shape, before, after, number)
        if isinstance(before, Replicate) and isinstance(after, Shard):
            return self.counts.take_part(local, wanted, number)
        moved = move_locally(self, local, axis, before, after, shape)
        if moved is not None:
            is_new = isinstance(before, OnRank) and moved is not local  # zeros, which must lie as the value does
            return restore_layout(self, moved, node.meta["val"]) if is_new else moved
        target = Redistribution(axis, before, after)
        lengths = target.list_lengths(shape)
        moved = self.add_collective(target, local, count_bytes(node, shape), reason, purpose=purpose, lengths=lengths)
        moved = self.counts.restore_order(moved, source, number)
        return moved if is_absent(wanted, self.ranks) else restore_layout(self, moved, node.meta["val"])

    def add_absent_step(self, node: fx.Node, source: Sharding, wanted: Sharding) -> fx.Node:
        """Add what this rank holds in place of a value that others move."""
        return self.add_absent(node.meta["val"], wanted, [self.values[node][source]])

    def add_absent(self, value: LogicalValue, sharding: Sharding, _inputs: Sequence[Any]) -> fx.Node:
        """Add what this rank holds in place of a value that another one has, which computes it from inputs."""
        shape = compute_local_shape(value.shape, sharding, self.ranks)
        return self.call(local_kernels.make_empty, tuple(shape), value.dtype, value.device)


def lower(sharded: ShardedProgram, mesh: Mesh) -> LocalGraph:
    """Return the program of the rank of `mesh`."""
    lowering = LoweringPass(sharded, mesh)
    local = lowering.lower_graph()
    size_of = partial(count_own_bytes, sharded=sharded, ranks=lowering.ranks)
    gather_again(local.graph, sharded, mesh)
    recompute(local.graph, choose_regions(local.graph, sharded.logical.recompute, size_of))
    add_in_place(local.graph)
    return local


def replace_arguments(node: fx.Node, values: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments with its tensor inputs replaced in the order of `list_tensor_slots`."""
    args, kwargs = list(node.args), dict(node.kwargs)
    operator: Any = node.target
    for position, described in enumerate(operator._schema.arguments):
        if position < len(args):
            args[position] = replace_argument(args[position], values)
        elif described.name in kwargs:
            kwargs[described.name] = replace_argument(kwargs[described.name], values)
    return tuple(args), kwargs


def replace_argument(argument: Any, values: Any) -> Any:
    """Replace each node in an argument by the next value; return other arguments unchanged."""
    if isinstance(argument, fx.Node):
        return next(values)
    if isinstance(argument, list | tuple):
        return type(argument)(next(values) if isinstance(item, fx.Node) else item for item in argument)
    return argument


def place_gradient(computed: Placement, stored: Placement) -> Placement:
    """Return the placement in which a program returns a gradient along one axis.

    Args:
        computed: The placement in which it is computed.
        stored: That of its parameter.
    """
    if isinstance(stored, Shard | BlockedShard | OnRank):
        return stored
    return computed if isinstance(computed, Partial) else Replicate()


def move_locally(
    builder: GraphBuilder, value: fx.Node, axis: MeshAxis, before: Placement, after: Placement, shape: list[int]
) -> fx.Node | None:
    """Return a value in another placement along an axis; None if ranks must exchange something.

    Args:
        builder: Adds operators to the rank's program.
        value: This rank's value.
        axis: The axis.
        before: The placement of the value.
        after: The wanted placement.
        shape: The shape of what the ranks along the axis have together.
    """
    match before, after:
        case Replicate(), BlockedShard():
            start, length = after.start(axis.rank), after.lengths[axis.rank]
            return builder.call(slice_blocks, value, after.dim, after.block, start, length)
        case Replicate(), OnRank():
            return value if after.rank == axis.rank else builder.call(local_kernels.make_absent, value)
        case Replicate(), _:
            return builder.call(local_kernels.keep_on_rank_zero, value, axis.rank)
        case OnRank(), Partial():
            return value if before.rank == axis.rank else builder.call(local_kernels.make_zeros, value, tuple(shape))
    return None


def add_in_place(graph: fx.Graph) -> None:
    """Let the sums of a local graph overwrite a term that no later operator reads, as autograd accumulates gradients.

    The sum then needs no memory of its own, and is in the processor's cache.
    """
    order = {node: position for position, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        terms = [item for item in node.args if isinstance(item, fx.Node)]
        if node.target is not aten.add.Tensor or node.kwargs or len(terms) < len(node.args):
            continue
        first, second = terms
        for term, other in ((first, second), (second, first)):
            is_last_use = all(order[user] <= order[node] for user in term.users)
            if term is not other and is_last_use and may_be_overwritten(term) and has_same_layout(term, node):
                node.target, node.args = aten.add_.Tensor, (term, other)
                break


def without_overwriting(target: Any) -> Any:
    """Return the operator that a sum in place was before; another one as it is."""
    return aten.add.Tensor if target is aten.add_.Tensor else target


def may_be_overwritten(value: fx.Node) -> bool:
    """Return whether a value has memory that nothing else refers to, besides operators that have read it."""
    return allocates(value.target) and "out" not in value.kwargs and all(allocates(user.target) for user in value.users)


def allocates(target: Any) -> bool:
    """Return whether a function is an operator whose results are never its arguments or views of them."""
    return isinstance(target, torch._ops.OpOverload) and not any(
        argument.alias_info is not None for argument in (*target._schema.arguments, *target._schema.returns)
    )


def has_same_layout(term: fx.Node, total: fx.Node) -> bool:
    """Return whether a term of a sum has the shape, strides and dtype of the sum."""
    if "logical" not in term.meta or "logical" not in total.meta:
        return False
    values = [node.meta["logical"].meta["val"] for node in (term, total)]
    # As texts, because a comparison of symbolic sizes would restrict the sizes for which the program is valid.
    layouts = [([*map(str, value.shape)], [*map(str, value.strides)], value.dtype) for value in values]
    return bool(layouts[0] == layouts[1])

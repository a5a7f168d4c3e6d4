"""Lower a sharded program to one rank's program on local values, with collectives where placements differ."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch import fx

from rankless.compiler.ir import local_kernels
from rankless.compiler.ir.blocked_dims import slice_blocks
from rankless.compiler.ir.logical_program import (
    ProgramOutput,
    draws_by_counter,
    format_operator,
    format_value,
)
from rankless.compiler.ir.tensor_parts import Part
from rankless.compiler.lowering.call_arguments import replace_arguments
from rankless.compiler.lowering.gradient_placement import place_gradient
from rankless.compiler.lowering.local_graph import LocalGraph
from rankless.compiler.lowering.local_operators import LOCAL_OPERATORS, restore_layout
from rankless.compiler.lowering.recomputation import recompute
from rankless.compiler.lowering.recomputed_regions import choose_regions, count_own_bytes
from rankless.compiler.lowering.repeated_gathers import gather_again
from rankless.compiler.lowering.row_counts import RowCounts
from rankless.compiler.lowering.sums_in_place import add_in_place
from rankless.compiler.lowering.value_check import ValueCheck
from rankless.compiler.rules.random import CounterDraw, lower_counter_draw
from rankless.compiler.rules.strategy import (
    LocalValue,
    OperatorCall,
    get_operator,
    list_tensor_slots,
    make_call,
)
from rankless.compiler.sharding.redistribute import (
    Collective,
    CollectivePurpose,
    CollectiveRecord,
    Redistribution,
    RingShift,
    StackingAllGather,
    count_bytes,
    estimate_costs,
)
from rankless.compiler.sharding.redistribution_steps import list_steps, replace_placement
from rankless.compiler.sharding.reordered_values import find_original
from rankless.compiler.sharding.sharding_propagation import ShardedProgram
from rankless.parallel.mesh import Mesh
from rankless.parallel.tensor_placement import (
    BlockedShard,
    Partial,
    Replicate,
    Shard,
    Sharding,
    compute_local_shape,
)

aten = torch.ops.aten


class LoweringPass:
    """Builds the local graph of one rank, operator by operator; implements `GraphBuilder` for the rules."""

    def __init__(self, sharded: ShardedProgram, mesh: Mesh) -> None:
        self.sharded = sharded
        self.axes, self.device = mesh.axes, mesh.device
        self.ranks = tuple(axis.rank for axis in mesh.axes)
        self.whole: Sharding = (Replicate(),) * len(mesh.axes)
        self.graph = fx.Graph()
        self.values: dict[fx.Node, dict[Sharding, fx.Node]] = {}
        self.results: dict[fx.Node, LocalValue] = {}
        self.draws: dict[fx.Node, CounterDraw] = {}
        self.counts = RowCounts(self)
        self.current_node: fx.Node | None = None
        self.current_axes: Sequence[int] = ()
        """The numbers of the axes whose strategies are being lowered."""
        self.generator: torch.Generator | None = None
        """The script's generator from which the operator draws that is being lowered."""

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Add an operator or a Rankless function."""
        args, kwargs = self.counts.resolve((args, kwargs))
        function = LOCAL_OPERATORS.get(target, target)
        if self.generator is not None:
            function = local_kernels.DrawFrom(self.generator, function)
        node = self.graph.call_function(function)
        # Set the arguments afterwards: PyTorch warns about sizes among the arguments of a new node.
        node.args, node.kwargs = args, kwargs
        node.meta.update(self.origin)
        logical = {} if self.current_node is None else self.current_node.meta
        node.meta.update(checkpoint=logical.get("checkpoint"), kept=logical.get("kept"))
        return node

    @property
    def origin(self) -> Mapping[str, Any]:
        """The line, the module and the pass of the operator that is being lowered."""
        meta = {} if self.current_node is None else self.current_node.meta
        return {
            "line": str(meta.get("line", "")),
            "module": meta.get("module"),
            "backward": bool(meta.get("backward")),
        }

    @property
    def rank(self) -> int:
        """This process's rank along the axis whose strategy is being lowered."""
        (number,) = self.current_axes
        return self.ranks[number]

    def input_sharding(self, index: int) -> Sharding:
        """Return the sharding in which that operator takes an input."""
        assert self.current_node is not None
        return self.sharded.input_shardings(self.current_node)[index]

    def output_size(self, index: int) -> list[int]:
        """Return the local size of an output of that operator."""
        assert self.current_node is not None
        value = self.current_node.meta["val"]
        shape = tuple((value[index] if isinstance(value, tuple | list) else value).shape)
        return compute_local_shape(shape, self.output_sharding(index), self.ranks)

    def output_sharding(self, index: int) -> Sharding:
        """Return the sharding of an output of that operator."""
        assert self.current_node is not None
        return self.sharded.output_shardings(self.current_node)[index]

    def list_parts(self, sharding: Sharding) -> tuple[Part, ...]:
        """Return this rank's part of a value, as ranges of dims."""
        return self.counts.list_parts(sharding)

    def all_reduce(self, value: fx.Node, reason: str, size: int) -> fx.Node:
        """Add a sum of a value of `size` bytes over the ranks along the current axes."""
        for number in self.current_axes:
            target = Redistribution(self.axes[number], Partial(), Replicate())
            value = self.add_collective(target, value, size, reason, purpose="operator")
        return value

    def all_gather(self, value: fx.Node, reason: str, size: int, number: int | None = None) -> fx.Node:
        """Add an all-gather of equal pieces, of `size` bytes each, along a new dim 0 and an axis."""
        if number is None:
            (number,) = self.current_axes
        axis = self.axes[number]
        return self.add_collective(StackingAllGather(axis), value, size * axis.size, reason, purpose="operator")

    def ring_shift(self, value: fx.Node, index: int, hops: int, reason: str) -> fx.Node:
        """Begin to pass a piece of an input of that operator to the next rank along the current axis."""
        assert self.current_node is not None
        (number,) = self.current_axes
        node = self.make_call(self.current_node, number).inputs[index]
        sharding = self.input_sharding(index)
        placement = sharding[number]
        assert isinstance(placement, Shard), placement
        whole = replace_placement(sharding, number, Replicate())
        size = count_bytes(node, compute_local_shape(node.meta["val"].shape, whole, self.ranks))
        lengths = tuple(placement.lengths[rank - hops] for rank in range(len(placement.lengths)))
        value.meta.setdefault("described", f"{format_value(node)} of {format_operator(self.current_node.target)}")
        target = RingShift(self.axes[number], Shard(placement.dim, lengths))
        return self.add_collective(target, value, size, reason, purpose="operator", lengths=(lengths,))

    def add_collective(
        self,
        target: Collective,
        value: fx.Node,
        size: int,
        reason: str,
        *,
        purpose: CollectivePurpose,
        lengths: Sequence[tuple[int, ...]] = (),
    ) -> fx.Node:
        """Add a collective and record its size, reason and purpose."""
        node = self.call(target, value, *lengths)
        gathered = isinstance(target, Redistribution) and target.is_gather
        node.meta["collective"] = CollectiveRecord(
            kind=target.__name__,
            purpose=purpose,
            value=value.meta.get("described", value.name),
            bytes=size,
            sent_bytes=target.sent_bytes(size),
            reason=reason,
            axis=target.axis.name,
            gathered=gathered,
            in_full=gathered and purpose != "output" and self.computes_in_full(self.axes.index(target.axis)),
            overlapped=isinstance(target, RingShift),
            **self.origin,
        )
        return node

    def computes_in_full(self, number: int) -> bool:
        """Return whether every rank along an axis computes the whole result of the current operator."""
        assert self.current_node is not None
        strategy = self.sharded.axes[number].strategies.get(self.current_node)
        return strategy is None or all(isinstance(output, Replicate) for output in strategy.outputs)

    def lower_graph(self) -> LocalGraph:
        """Return the complete local graph."""
        logical = self.sharded.logical
        checks: dict[fx.Node, list[ProgramOutput]] = {}
        for node, output in logical.outputs:
            if output.kind == "check":
                checks.setdefault(node, []).append(output)
        inputs = []
        for node in logical.graph.nodes:
            if node in logical.inputs:
                local = self.graph.placeholder(node.name)
                local.meta.update(described=logical.inputs[node].name, kind=logical.inputs[node].kind)
                self.values[node] = {self.sharded.sharding(node): local}
                inputs.append((local, logical.inputs[node]))
        for node in logical.graph.nodes:
            if node not in logical.inputs and node.op != "output":
                self.lower_node(node)
            if not checks:  # else another program may be the right one
                self.counts.add_checks()
            for check in checks.get(node, ()):
                self.call(ValueCheck(check.index, check.expected), self.redistribute(node, self.whole, check.name))
        self.counts.add_checks()
        outputs, pending_gradients = self.lower_outputs()
        self.graph.output(tuple(node for node, _ in outputs))
        return LocalGraph(
            graph=self.graph,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            pending_gradients=tuple(pending_gradients),
        )

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

    def make_call(self, node: fx.Node, number: int) -> OperatorCall:
        """Return an operator as the axis with this number divides it."""
        axis = self.sharded.axes[number]
        return make_call(node, axis.placements, axis.ranks)

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
        self.generator = node.meta.get("generator")
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
        self.counts.exchange(before)
        self.counts.exchange(after)
        if isinstance(before, Replicate) and isinstance(after, Shard):
            return self.counts.take_part(local, wanted, number)
        if isinstance(before, Replicate) and isinstance(after, BlockedShard):
            start, length = after.start(axis.rank), after.lengths[axis.rank]
            return self.call(slice_blocks, local, after.dim, after.block, start, length)
        if isinstance(before, Replicate):
            return self.call(local_kernels.keep_on_rank_zero, local, axis.rank)
        shape = compute_local_shape(node.meta["val"].shape, replace_placement(source, number, Replicate()), self.ranks)
        size = count_bytes(node, shape)
        target = Redistribution(axis, before, after)
        lengths = target.list_lengths(shape)
        moved = self.add_collective(target, local, size, reason, purpose=purpose, lengths=lengths)
        moved = self.counts.restore_order(moved, source, number)
        return restore_layout(self, moved, node.meta["val"])


def lower(sharded: ShardedProgram, mesh: Mesh) -> LocalGraph:
    """Return the program of the rank of `mesh`."""
    lowering = LoweringPass(sharded, mesh)
    local = lowering.lower_graph()
    size_of = partial(count_own_bytes, sharded=sharded, ranks=lowering.ranks)
    gather_again(local.graph, sharded, mesh)
    recompute(local.graph, choose_regions(local.graph, sharded.logical.recompute, size_of))
    add_in_place(local.graph)
    return local

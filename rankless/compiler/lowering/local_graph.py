"""One rank's program as a graph on local values, and what adds operators and collectives to it.

Lowering returns it, and scheduling changes it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from rankless.compiler.ir import custom_ops, local_kernels
from rankless.compiler.ir.local_kernels import GeneratorStart
from rankless.compiler.ir.logical_program import (
    LogicalValue,
    ProgramInput,
    ProgramOutput,
    format_operator,
    format_value,
)
from rankless.compiler.ir.memory_order import find_memory_order, find_repeated_dims, order_memory, repeat_memory
from rankless.compiler.ir.tensor_parts import Part
from rankless.compiler.rules.extension_operators import find_operator
from rankless.compiler.rules.strategy import (
    GraphBuilder,
    OperatorCall,
    make_call,
)
from rankless.compiler.selected_rows.local_counts import RowCounts
from rankless.compiler.sequence_parallel import attention_kernels
from rankless.compiler.sharding.redistribute import (
    Collective,
    CollectivePurpose,
    CollectiveRecord,
    Redistribution,
    RingShift,
    StackingAllGather,
    count_bytes,
    replace_placement,
)
from rankless.compiler.sharding.sharding_propagation import ShardedProgram
from rankless.compiler.tracing.symbolic_sizes import size_hint
from rankless.parallel.mesh import Mesh, MeshAxis
from rankless.parallel.tensor_placement import (
    Partial,
    Replicate,
    Shard,
    Sharding,
    compute_local_shape,
)

aten = torch.ops.aten
rankless_ops = torch.ops.rankless

LOCAL_OPERATORS: dict[Any, Callable[..., Any]] = {
    aten.view.default: aten.reshape.default,  # a gathered or reduced value may have other strides than the logical one
    aten._unsafe_view.default: aten.reshape.default,
    rankless_ops.linear.default: custom_ops.run_linear,
    rankless_ops.linear_weight.default: custom_ops.run_linear_weight,
    rankless_ops.recurrent.default: custom_ops.run_recurrent,
    rankless_ops.recurrent_backward.default: custom_ops.run_recurrent_backward,
    aten._scaled_dot_product_flash_attention_for_cpu.default: attention_kernels.run_cpu_attention,
}
"""Operators, and the functions that run in their place."""


@dataclass(frozen=True, kw_only=True)
class LocalGraph:
    """One rank's program as a graph on local values.

    Its collectives carry a `CollectiveRecord` as `meta["collective"]`. Gradients may still be partial sums:
    `pending_gradients` names those that `schedule_gradients` reduces.
    """

    graph: fx.Graph
    inputs: tuple[tuple[fx.Node, ProgramInput], ...]
    outputs: tuple[tuple[fx.Node, ProgramOutput], ...]
    pending_gradients: tuple[fx.Node, ...]

    @property
    def recomputed(self) -> int:
        """The number of operators of the forward pass that the backward pass computes again."""
        return sum("repeats" in node.meta and node.target is not getitem for node in self.graph.nodes)

    @property
    def collectives(self) -> tuple[CollectiveRecord, ...]:
        """All collectives, in the order in which the program starts them."""
        return tuple(node.meta["collective"] for node in self.graph.nodes if "collective" in node.meta)


class LocalGraphBuilder:
    """Adds operators and collectives to the local graph of one rank; implements `GraphBuilder` for the rules."""

    counts: RowCounts
    """The numbers of rows that values select."""

    def __init__(self, sharded: ShardedProgram, mesh: Mesh) -> None:
        self.sharded = sharded
        self.axes, self.device = mesh.axes, mesh.device
        self.ranks = tuple(axis.rank for axis in mesh.axes)
        self.whole: Sharding = (Replicate(),) * len(mesh.axes)
        self.graph = fx.Graph()
        self.current_node: fx.Node | None = None
        self.current_axes: Sequence[int] = ()
        """The numbers of the axes whose strategies are being lowered."""
        self.generator: torch.Generator | None = None
        """The script's generator from which the operator draws that is being lowered."""
        self.start: GeneratorStart | None = None
        """How that generator gets its state, before the operator's first function runs."""

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Add an operator or a Rankless function."""
        args, kwargs = self.counts.resolve((args, kwargs))
        function = find_local(target)
        if self.generator is not None:
            function = local_kernels.DrawFrom(self.generator, function, self.start)
            self.start = None
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
        return self.axis.rank

    @property
    def axis(self) -> MeshAxis:
        """The axis whose strategy is being lowered."""
        (number,) = self.current_axes
        return self.axes[number]

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

    @property
    def early_masks(self) -> frozenset[fx.Node]:
        """Masks that are known before what they select: selected rows are counted in them."""
        return frozenset()

    def all_reduce(self, value: fx.Node, reason: str, size: int) -> fx.Node:
        """Add a sum of a value of `size` bytes over the ranks along the current axes."""
        for number in self.current_axes:
            target = Redistribution(self.axes[number], Partial(), Replicate())
            value = self.add_collective(target, value, size, reason, purpose="operator")
        return value

    def all_gather(self, value: fx.Node, reason: str, size: int, number: int | None = None) -> fx.Node:
        """Add an all-gather of equal pieces, of `size` bytes each, along a new dim 0 and one axis or all current."""
        numbers = self.current_axes if number is None else (number,)
        for place, axis in enumerate(self.axes[each] for each in reversed(numbers)):
            size *= axis.size
            value = self.add_collective(StackingAllGather(axis), value, size, reason, purpose="operator")
            if place:
                value = self.call(torch.flatten, value, 0, 1)
        return value

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
        value: fx.Node | tuple[fx.Node, ...],
        size: int,
        reason: str,
        *,
        purpose: CollectivePurpose,
        lengths: Sequence[tuple[int, ...]] = (),
    ) -> fx.Node:
        """Add a collective of one value, or of several, and record its size, reason and purpose."""
        node = self.call(target, value, *lengths)
        values = value if isinstance(value, tuple) else (value,)
        gathered = isinstance(target, Redistribution) and target.is_gather
        node.meta["collective"] = CollectiveRecord(
            kind=target.__name__,
            purpose=purpose,
            value=" and ".join(dict.fromkeys(str(each.meta.get("described", each.name)) for each in values)),
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

    def make_call(self, node: fx.Node, number: int) -> OperatorCall:
        """Return an operator as the axis with this number divides it."""
        axis = self.sharded.axes[number]
        return make_call(node, axis.placements, axis.ranks)


def find_local(operator: Any) -> Any:
    """Return the function that runs in place of an operator on local values: itself if there is no other."""
    added = find_operator(operator)
    return LOCAL_OPERATORS.get(operator, operator) if added is None else added.local


def restore_layout(builder: GraphBuilder, moved: fx.Node, logical: LogicalValue) -> fx.Node:
    """Return a value that a collective has made contiguous in its traced order; see Note [memory layout]."""
    shape, strides = ([int(size_hint(item)) for item in sizes] for sizes in (logical.shape, logical.strides))
    repeated = find_repeated_dims(shape, strides)
    order = find_memory_order([1 if dim in repeated else size for dim, size in enumerate(shape)], strides)
    if repeated:
        return builder.call(repeat_memory, moved, repeated, order)
    return moved if order is None else builder.call(order_memory, moved, order)

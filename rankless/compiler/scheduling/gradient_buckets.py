"""Schedule gradient reductions in buckets: start each after its last gradient, and wait for all at the end.

This is the scheme of PyTorch's DistributedDataParallel (Li et al., VLDB 2020) as a pass over the local graph.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from rankless.collectives.mesh_collectives import await_end, start_all_reduce, start_reduce_scatter
from rankless.compiler.ir.custom_ops import run_linear_weight
from rankless.compiler.ir.logical_program import LogicalProgram, LogicalValue, is_fresh
from rankless.compiler.lowering.local_graph import LocalGraph
from rankless.compiler.scheduling.gradient_buckets_and_state_storage import (
    EnsureOwnMemory,
    FlatMemory,
    GradientLayout,
    StagingMemory,
    StateStorage,
    limit_group,
)
from rankless.compiler.sharding.redistribute import CollectiveRecord, all_reduce_bytes
from rankless.ownership.shard_layout import ShardGroup, ShardLayout, group_in_order
from rankless.parallel.mesh import MeshAxis

aten = torch.ops.aten

BUCKET_BYTES = 25 * 2**20
FIRST_BUCKET_BYTES = 2**20
"""The first bucket is small, so that reducing starts early."""

OUT_VARIANTS: dict[Any, Callable[..., Any]] = {
    aten.mm.default: aten.mm.out,
    run_linear_weight: run_linear_weight,
}
"""Operators that compute most gradients, and their variants with `out`, which save a copy of every weight per step."""


@dataclass(frozen=True, kw_only=True)
class GradientOutput:
    """A gradient that a local program returns."""

    local: fx.Node
    value: LogicalValue
    name: str
    layout: GradientLayout
    pieces: ShardLayout | None = None
    """How it is divided between the workers along an axis, if each of them keeps only its piece."""
    is_scattered: bool = False
    """Whether the workers along that axis have terms of it, whose sum gives each its piece."""

    @property
    def axes(self) -> tuple[MeshAxis, ...]:
        """The axes along which each rank has a term of it."""
        axes: tuple[MeshAxis, ...] = self.local.meta.get("summed_along", ())
        return axes

    @property
    def bytes(self) -> int:
        """The size of the whole, by which all workers choose the same buckets."""
        return self.value.numel() * self.value.element_size()


class ReducedBucket:
    """Memory in which workers sum gradients. Only the sum along one axis overlaps with computation."""

    def __init__(
        self, axes: tuple[MeshAxis, ...], axis: MeshAxis, memory: FlatMemory, layouts: tuple[GradientLayout, ...]
    ) -> None:
        self.axes = axes
        self.axis = axis
        self.memory = memory
        self.layouts = layouts
        self.work: dist.Work | None = None

    def open(self) -> None:
        """Prepare the memory for a call of the program. The call before may have ended early."""
        if self.work is not None:
            await_end(self.work)
            self.work = None
        self.memory.renew()

    def wait(self) -> None:
        """Wait for the sums along the first axis, and forget the collective."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def finish(self) -> list[Tensor]:
        """Wait for the sums, and return what this worker has of them."""
        self.wait()
        for axis in self.axes:
            work = None if axis is self.axis else start_all_reduce(self.memory.flat, among=axis)
            if work is not None:
                work.wait()
        # Return new tensors over the same memory: an optimizer or a user may keep or detach them.
        return [view.detach() for view in self.memory.get_views(self.layouts)]


class GradientBucket(ReducedBucket):
    """Gradients that are reduced together. `.grad` of the parameters are views of its memory."""

    is_writable = True
    """Whether operators may write gradients into its memory."""

    def __init__(self, axes: tuple[MeshAxis, ...], memory: FlatMemory, layouts: tuple[GradientLayout, ...]) -> None:
        super().__init__(axes, axes[0], memory, layouts)
        self._views: list[Tensor] = []

    def open(self) -> None:
        """Prepare the memory, and its views."""
        super().open()
        self._views = self.memory.get_views(self.layouts)

    def gradient_view(self, index: int) -> Tensor:
        """Return the memory of one gradient, for an operator to write into."""
        return self._views[index]

    def start(self, indices: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """Copy in the gradients that were not written in place, and start to reduce all."""
        if gradients:
            torch._foreach_copy_([self._views[index] for index in indices], list(gradients))
        self._views = []
        self.work = start_all_reduce(self.memory.flat, among=self.axis)


class ScatteredBucket(ReducedBucket):
    """Gradients that are summed together, of which each worker along an axis gets its pieces."""

    def __init__(
        self,
        axes: tuple[MeshAxis, ...],
        axis: MeshAxis,
        pieces: ShardGroup,
        memory: FlatMemory,
        staging: StagingMemory,
    ) -> None:
        super().__init__(axes, axis, memory, tuple(make_shard_layout(item, axis.rank) for item in pieces.layouts))
        self._pieces = pieces
        self._staging = staging
        self._written: Tensor | None = None
        """The staging memory, if an operator writes its gradient there."""

    @property
    def is_writable(self) -> bool:
        """Whether an operator may write the gradient into the memory that is summed."""
        return self._pieces.is_one_memory

    def open(self) -> None:
        """Prepare the memory, and forget what an operator has written in a call that ended early."""
        super().open()
        self._written = None

    def gradient_view(self, _index: int) -> Tensor:
        """Return the memory of the only gradient, for an operator to write into."""
        (layout,) = self._pieces.layouts
        self._written = self._take_staging()
        return layout.view_flat(self._written, layout.shape)

    def start(self, _indices: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """Copy the gradients together unless they were written in place, and start to sum them."""
        flat, self._written = self._written, None
        if flat is None:
            flat = self._take_staging()
            self._pieces.join_wholes(gradients, flat)
        self.work = start_reduce_scatter(self.memory.flat, flat, among=self.axis)

    def _take_staging(self) -> Tensor:
        return self._staging.take(self._pieces.flat_size, self.memory.flat, self.wait, among=self.axis)


def make_shard_layout(layout: ShardLayout, rank: int) -> GradientLayout:
    """Return the layout of one worker's piece of a gradient."""
    return GradientLayout(layout.shard_shape(rank), layout.shard_strides(rank))


def schedule_gradients(local: LocalGraph, program: LogicalProgram, storage: StateStorage | None = None) -> LocalGraph:
    """Return the local graph of a logical program with its pending gradients reduced, each in memory of its own.

    See Note [memory of a gradient].

    Args:
        storage: The memory of gradients, and which of them each worker keeps only a piece of. Default: none.
    """
    storage = storage or StateStorage()
    gradients = list_gradients(local, program, storage)
    order = {node: position for position, node in enumerate(local.graph.nodes)}
    pending = set(local.pending_gradients)
    # Of several gradients that are one value, the first is reduced, and the others are copies of it.
    to_reduce = {gradient.local: gradient for gradient in reversed(gradients) if gradient.local in pending}
    in_order = sorted(to_reduce.values(), key=lambda gradient: order[gradient.local])
    sums: dict[str, fx.Node] = {}
    for number, group in enumerate(group_into_buckets(in_order)):
        bucket = make_bucket(group, number, storage)
        sums |= add_bucket(local.graph, bucket, group)
    uses = Counter(node for node, _ in local.outputs)
    reduced: dict[str, fx.Node] = {}
    output = local.graph.output_node()
    with local.graph.inserting_before(output):
        for gradient in gradients:
            is_placed = gradient.is_scattered or gradient.pieces is None
            if gradient.name in sums and is_placed:
                reduced[gradient.name] = sums[gradient.name]
                continue
            known = to_reduce.get(gradient.local)
            value = gradient.local if known is None else sums[known.name]
            is_new = is_fresh(value) or value.meta.get("has_own_memory", False)
            is_shared = known is not None or uses[value] > 1 or len(value.users) > 1 or not is_new
            is_piece = known is not None and known.is_scattered and known.pieces == gradient.pieces
            reduced[gradient.name] = add_own_memory(
                local.graph, gradient, value, storage, is_shared=is_shared, is_piece=is_piece
            )
    outputs = tuple(
        (reduced[described.name] if described.kind == "gradient" else node, described)
        for node, described in local.outputs
    )
    output.args = (tuple(node for node, _ in outputs),)
    return LocalGraph(graph=local.graph, inputs=local.inputs, outputs=outputs, pending_gradients=())


def list_gradients(local: LocalGraph, program: LogicalProgram, storage: StateStorage) -> list[GradientOutput]:
    """Return the gradients that a local program returns."""
    return [
        GradientOutput(
            local=node,
            value=logical.meta["val"],
            name=described.name,
            layout=layout,
            pieces=storage.find_gradient_layout(program, described.name, logical.meta["val"]),
            is_scattered=storage.axis in node.meta.get("summed_along", ()) and described.name in storage.gradients,
        )
        for (node, described), (logical, _), layout in zip(
            local.outputs, program.outputs, find_gradient_layouts(program, storage), strict=True
        )
        if layout is not None
    ]


def add_own_memory(
    graph: fx.Graph,
    gradient: GradientOutput,
    value: fx.Node,
    storage: StateStorage,
    *,
    is_shared: bool,
    is_piece: bool,
) -> fx.Node:
    """Add what gives memory of its own to a gradient that is in no bucket, or to this worker's piece of it.

    Args:
        value: It as a whole, or this worker's piece of it.
        storage: The axis that divides it.
        is_shared: Whether another value may have its memory.
        is_piece: Whether the value is a piece.
    """
    if gradient.pieces is None or storage.axis is None:
        return graph.call_function(EnsureOwnMemory(gradient.layout, is_shared), (value,))
    if not is_piece:
        value = graph.call_function(gradient.pieces.get_shard, (value, storage.axis.rank))
    layout = make_shard_layout(gradient.pieces, storage.axis.rank)
    return graph.call_function(EnsureOwnMemory(layout, is_shared=True), (value,))


def make_bucket(
    group: Sequence[GradientOutput], number: int, storage: StateStorage
) -> GradientBucket | ScatteredBucket:
    """Return the bucket of a group of gradients, which is the one with this number in its program."""
    first, memory = group[0], storage.memory
    axis, layouts = storage.axis, [gradient.pieces for gradient in group if gradient.pieces is not None]
    if first.is_scattered and axis is not None:
        pieces = ShardGroup(tuple(layouts), axis.size)
        flat = memory.get(number, pieces.chunk_size, first.value)
        return ScatteredBucket(first.axes, axis, pieces, flat, memory.staging)
    whole = tuple(gradient.layout for gradient in group)
    size = sum(layout.size for layout in whole)
    return GradientBucket(first.axes, memory.get(number, size, first.value, among=first.axes[0]), whole)


def add_bucket(
    graph: fx.Graph, bucket: GradientBucket | ScatteredBucket, group: Sequence[GradientOutput]
) -> dict[str, fx.Node]:
    """Reduce a group of gradients in a bucket: start after the last one, and finish at the end; return them by name."""
    is_scattered = isinstance(bucket, ScatteredBucket)
    output = graph.output_node()
    with graph.inserting_before(next((node for node in graph.nodes if node.op != "placeholder"), output)):
        graph.call_function(bucket.open, ())
    in_place = [
        bucket.is_writable and try_write_in_place(graph, gradient.local, bucket, index)
        for index, gradient in enumerate(group)
    ]
    copied = [index for index, is_written in enumerate(in_place) if not is_written]
    last = group[-1].local
    with graph.inserting_after(last):
        started = graph.call_function(bucket.start, (copied, [group[index].local for index in copied]))
    size = sum(gradient.layout.size * gradient.value.element_size() for gradient in group)
    started.meta["collective"] = CollectiveRecord(
        kind="reduce_scatter" if is_scattered else "all_reduce",
        purpose="gradient",
        value=", ".join(gradient.name for gradient in group),
        bytes=size,
        sent_bytes=sum(all_reduce_bytes(size, axis.size) for axis in bucket.axes) // (2 if is_scattered else 1),
        line=str(last.meta.get("line", "")),
        reason=f"{len(group)} gradients" if len(group) > 1 else "a gradient",
        axis=", ".join(axis.name for axis in bucket.axes),
        backward=True,
        overlapped=True,
    )
    with graph.inserting_before(output):
        finished = graph.call_function(bucket.finish, ())
        return {gradient.name: graph.call_function(getitem, (finished, index)) for index, gradient in enumerate(group)}


def find_gradient_layouts(program: LogicalProgram, storage: StateStorage) -> list[GradientLayout | None]:
    """Return the layout of each output of a program that is a gradient; None for the others."""
    parameters = {described.name: node.meta["val"] for node, described in program.inputs.items()}
    return [
        # A gradient may belong to a parameter that the program does not read.
        storage.find_own_layout(described.name, parameters.get(described.name, node.meta["val"]))
        if described.kind == "gradient"
        else None
        for node, described in program.outputs
    ]


def try_write_in_place(graph: fx.Graph, node: fx.Node, bucket: GradientBucket | ScatteredBucket, index: int) -> bool:
    """Let a matrix product write its gradient straight into the bucket; return False for any other gradient."""
    if node.target not in OUT_VARIANTS or len(node.users) > 1:
        return False
    with graph.inserting_before(node):
        gradient_view = graph.call_function(bucket.gradient_view, (index,))
    node.target = OUT_VARIANTS[node.target]
    node.kwargs = {"out": gradient_view}
    return True


def group_into_buckets(gradients: Sequence[GradientOutput]) -> list[list[GradientOutput]]:
    """Group gradients, in the order of computation, by dtype, axes and limited size."""
    scattered = limit_group([gradient.bytes for gradient in gradients if gradient.is_scattered])

    def limit(gradient: GradientOutput, groups: int) -> int:
        if gradient.is_scattered:
            return scattered
        return FIRST_BUCKET_BYTES if groups == 1 else BUCKET_BYTES

    return group_in_order(
        gradients,
        kind=lambda gradient: (gradient.value.dtype, gradient.axes, gradient.is_scattered),
        size=lambda gradient: gradient.bytes,
        limit=limit,
    )

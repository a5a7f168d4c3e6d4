"""Schedule gradient reductions in buckets: start each after its last gradient, and wait for all at the end.

This is the scheme of PyTorch's DistributedDataParallel (Li et al., VLDB 2020) as a pass over the local graph.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import getitem
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from rankless.collectives.mesh_collectives import start_all_reduce
from rankless.compiler.ir.custom_ops import run_linear_weight
from rankless.compiler.ir.logical_program import LogicalValue
from rankless.compiler.lowering.lower import LocalGraph
from rankless.compiler.sharding.redistribute import CollectiveRecord, all_reduce_bytes
from rankless.parallel.mesh import Mesh

aten = torch.ops.aten

BUCKET_BYTES = 25 * 2**20
FIRST_BUCKET_BYTES = 2**20
"""The first bucket is small, so that reducing starts early."""


OUT_VARIANTS: dict[Any, Callable[..., Any]] = {
    aten.mm.default: aten.mm.out,
    run_linear_weight: run_linear_weight,
}
"""Operators that compute most gradients, and their variants with `out`, which save a copy of every weight per step."""


class GradientMemory:
    """The bucket memory of a job. Its programs share it, because one runs at a time."""

    def __init__(self) -> None:
        self._flats: dict[Hashable, Tensor] = {}

    def get_flat(self, number: int, size: int, like: LogicalValue) -> Tensor:
        """Return the memory of the bucket with this number in a program."""
        key = number, size, like.dtype, like.device
        if key not in self._flats:
            self._flats[key] = torch.empty(size, dtype=like.dtype, device=like.device)
        return self._flats[key]


class GradientBucket:
    """Gradients that are reduced together, in memory that lives from step to step.

    `.grad` of the parameters are views of that memory.
    """

    def __init__(self, mesh: Mesh, values: Sequence[LogicalValue], flat: Tensor) -> None:
        self.mesh = mesh
        sizes = [value.numel() for value in values]
        self.flat = flat
        pieces = self.flat.split(sizes)
        self.gradient_views: list[Tensor] = [
            piece.view(value.shape) for piece, value in zip(pieces, values, strict=True)
        ]
        self.work: dist.Work | None = None

    def gradient_view(self, index: int) -> Tensor:
        """Return the memory of one gradient, for an operator to write into."""
        return self.gradient_views[index]

    def start(self, indices: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """Copy in the gradients that were not written in place, and start to reduce all."""
        if gradients:
            torch._foreach_copy_([self.gradient_views[index] for index in indices], list(gradients))
        self.work = start_all_reduce(self.flat, mesh=self.mesh)

    def finish(self) -> list[Tensor]:
        """Wait for the sums and return them."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        # Return new tensors over the same memory: an optimizer or a user may keep or detach them.
        return [view.detach() for view in self.gradient_views]


def schedule_gradients(
    local: LocalGraph, gradients: Mapping[fx.Node, fx.Node], mesh: Mesh, memory: GradientMemory
) -> LocalGraph:
    """Return the program with its pending gradients reduced; `gradients` maps each to its logical node."""
    order = {node: position for position, node in enumerate(local.graph.nodes)}
    pending_gradients = sorted(local.pending_gradients, key=order.__getitem__)
    reduced: dict[fx.Node, fx.Node] = {}
    names = {node: described.name for node, described in local.outputs}
    output = next(node for node in local.graph.nodes if node.op == "output")
    for number, nodes in enumerate(group_into_buckets(pending_gradients, gradients)):
        values = [gradients[node].meta["val"] for node in nodes]
        bucket = GradientBucket(
            mesh, values, memory.get_flat(number, sum(value.numel() for value in values), values[0])
        )
        copied = [index for index, node in enumerate(nodes) if not try_write_in_place(local.graph, node, bucket, index)]
        with local.graph.inserting_after(nodes[-1]):
            started = local.graph.call_function(bucket.start, (copied, [nodes[index] for index in copied]))
        with local.graph.inserting_before(output):
            finished = local.graph.call_function(bucket.finish, ())
            for index, node in enumerate(nodes):
                reduced[node] = local.graph.call_function(getitem, (finished, index))
        size = sum(value.numel() * value.element_size() for value in values)
        started.meta["collective"] = CollectiveRecord(
            kind="all_reduce",
            purpose="gradient",
            value=", ".join(names[node] for node in nodes),
            bytes=size,
            sent_bytes=all_reduce_bytes(size, mesh.size),
            line=str(nodes[-1].meta.get("line", "")),
            reason=f"{len(nodes)} gradients" if len(nodes) > 1 else "a gradient",
            backward=True,
            overlapped=True,
        )
    outputs = tuple((reduced.get(node, node), described) for node, described in local.outputs)
    output.args = (tuple(node for node, _ in outputs),)
    return LocalGraph(graph=local.graph, inputs=local.inputs, outputs=outputs, pending_gradients=())


def try_write_in_place(graph: fx.Graph, node: fx.Node, bucket: GradientBucket, index: int) -> bool:
    """Let a matrix product write its gradient straight into the bucket; return False for any other gradient."""
    if node.target not in OUT_VARIANTS or len(node.users) > 1:
        return False
    with graph.inserting_before(node):
        gradient_view = graph.call_function(bucket.gradient_view, (index,))
    node.target = OUT_VARIANTS[node.target]
    node.kwargs = {"out": gradient_view}
    return True


def group_into_buckets(
    pending_gradients: Sequence[fx.Node], gradients: Mapping[fx.Node, fx.Node]
) -> list[list[fx.Node]]:
    """Group gradients, in the order of computation, by dtype and limited size."""
    groups: list[list[fx.Node]] = []
    filled_bytes, dtype = 0, None
    for node in pending_gradients:
        value: Any = gradients[node].meta["val"]
        size = value.numel() * value.element_size()
        limit = FIRST_BUCKET_BYTES if len(groups) == 1 else BUCKET_BYTES
        if not groups or dtype != value.dtype or filled_bytes + size > limit:
            groups.append([])
            filled_bytes, dtype = 0, value.dtype
        groups[-1].append(node)
        filled_bytes += size
    return groups

"""Run the programs of all workers of a mesh in one process, each up to a collective before the next.

Collectives are computed from the list of all workers' values. Random operators start from the same generator state on
every worker, as in real processes, and must leave the same one.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from rankless.collectives.mesh_collectives import PendingShift
from rankless.compiler.ir.local_kernels import DrawFrom, join_blocks, make_absent, reduce_extremum
from rankless.compiler.ir.tensor_parts import list_parts, take_parts
from rankless.compiler.lowering.local_graph import LocalGraph
from rankless.compiler.sharding.redistribute import Collective, JointGather, RingShift, StackingAllGather
from rankless.compiler.tracing.symbolic_sizes import evaluate_size, has_count
from rankless.parallel.default_generator import restore_generators, save_generators
from rankless.parallel.mesh import AxisRole, MeshAxis
from rankless.parallel.tensor_placement import BlockedShard, OnRank, Placement, Shard

ROLES: tuple[AxisRole, ...] = ("data", "tensor", "sequence", "expert")
"""The roles of the axes of simulated meshes, from the outermost; how many there are depends on the test."""


def interpret(
    graphs: Sequence[LocalGraph],
    inputs: Sequence[Sequence[Tensor]],
    symbols: Mapping[str, int],
    axis_sizes: Sequence[int],
) -> list[dict[fx.Node, Any]]:
    """Run the graphs of a mesh's workers, each up to the next collective before the others go on."""
    values: list[dict[fx.Node, Any]] = [
        {node: value.detach() for (node, _), value in zip(graph.inputs, given, strict=True)}
        for graph, given in zip(graphs, inputs, strict=True)
    ]
    targets = [node.target for graph in graphs for node in graph.graph.nodes]
    own = list(dict.fromkeys(target.generator for target in targets if isinstance(target, DrawFrom)))
    workers = [run_to_collectives(graph.graph, known, symbols) for graph, known in zip(graphs, values, strict=True)]
    states = [save_generators(own) for _ in workers]
    waiting: dict[int, tuple[fx.Node, Any]] = {}
    running = set(range(len(workers)))
    while running:
        for number in running:
            restore_generators(states[number])
            found = next(workers[number], None)
            states[number] = save_generators(own)
            if found is not None:
                waiting[number] = found
        running = run_collectives(waiting, values, axis_sizes)
        assert running or not waiting, "workers wait for each other in different collectives"
    for other in states:
        pairs = zip(other, states[0], strict=True)
        assert all(torch.equal(one, first) for (_, one), (_, first) in pairs), "workers have drawn different numbers"
    return values


def run_collectives(
    waiting: dict[int, tuple[fx.Node, Any]], values: Sequence[dict[fx.Node, Any]], axis_sizes: Sequence[int]
) -> set[int]:
    """Run the collectives in which all members of a group wait, and return the members, which then go on."""
    done: set[int] = set()
    for number in sorted(waiting):
        target = waiting[number][0].target
        members = list_members(number, target.axis, axis_sizes)
        axes = {waiting[member][0].target.axis.name for member in members if member in waiting}
        if number in done or axes != {target.axis.name} or not set(members) <= set(waiting):
            continue
        pieces = [waiting[member][1][0][0] for member in members]
        lengths = waiting[number][1][0][1:]
        for rank, member in enumerate(members):
            node = waiting[member][0]
            assert (type(node.target), node.target.__name__) == (type(target), target.__name__)
            keep(values[member], node, call_collective(node.target, pieces, lengths, rank))
        done |= set(members)
    for member in done:
        del waiting[member]
    return done


def run_to_collectives(
    graph: fx.Graph, known: dict[fx.Node, Any], symbols: Mapping[str, int]
) -> Iterator[tuple[fx.Node, Any]]:
    """Run a worker's graph, and yield its collectives with their arguments; the caller adds their results."""
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        args, kwargs = fx.node.map_aggregate(
            (node.args, node.kwargs),
            lambda item: known[item] if isinstance(item, fx.Node) else evaluate_size(item, symbols),
        )
        if isinstance(node.target, Collective):
            yield node, (args, kwargs)
        else:
            with torch.no_grad():
                keep(known, node, node.target(*args, **kwargs))


def keep(known: dict[fx.Node, Any], node: fx.Node, result: Any) -> None:
    """Keep the result of a node."""
    known[node] = result
    if isinstance(result, Tensor) and "logical" in node.meta:
        check_layout(node, result, known)


OWN_LAYOUT = (
    "_native_batch_norm_legit",
    "native_batch_norm_backward",
    "_softmax_backward_data",
    "_log_softmax_backward_data",
)
"""Operators of PyTorch whose kernels lay out results in another way than a trace says, on one device too."""


def check_layout(node: fx.Node, value: Tensor, known: Mapping[fx.Node, Any]) -> None:
    """Assert that a value that a rank has whole lies in memory as the logical value does.

    A piece may lie otherwise, as that of an expanded value does: random operators draw in the logical value's order.
    """
    logical = node.meta["logical"]
    shape, strides = logical.meta["val"].shape, logical.meta["val"].strides
    if has_count(shape):  # such a value is whole on no rank, or lies as its rows were selected
        return
    overlaps = any(size != 1 and stride == 0 for size, stride in zip(shape, strides, strict=True))
    if overlaps or 0 in value.shape or tuple(value.shape) != tuple(shape):
        return
    order = sorted(range(len(shape)), key=strides.__getitem__, reverse=True)
    found = [value.stride(dim) for dim in order if shape[dim] != 1]
    if found == sorted(found, reverse=True):
        return
    producers = f"{logical.target} {[item.target for item in logical.all_input_nodes]}"
    has_own = any(name in producers for name in OWN_LAYOUT) or lacks_copy(logical) or follows_own_layout(logical)
    logical.meta["own layout"] = has_own or is_of_divided_weights(node, known)
    assert logical.meta["own layout"], f"{logical.target}: {value.stride()}, traced {shape}, {strides}"


def lacks_copy(logical: fx.Node) -> bool:
    """Return whether a reshaped value is a view of its input, because the copy that the script made is dropped."""
    if logical.target not in (torch.ops.aten.view.default, torch.ops.aten.reshape.default):
        return False
    source, value = logical.all_input_nodes[0].meta["val"], logical.meta["val"]
    laid_out = torch.empty_strided(source.shape, source.strides, device="meta").reshape(value.shape)
    return laid_out.stride() != tuple(value.strides)


def is_of_divided_weights(node: fx.Node, known: Mapping[fx.Node, Any]) -> bool:
    """Return whether a value is a gradient of a convolution whose weights this rank has a piece of.

    Their layout decides how the kernel lays out the gradient, and a piece with one channel has that of several.
    """
    for source in node.all_input_nodes:
        if source.target is torch.ops.aten.convolution_backward.default:
            weights = source.args[2]
            logical = source.meta["logical"].args[2]
            return tuple(known[weights].shape) != tuple(logical.meta["val"].shape)
    return False


def follows_own_layout(logical: fx.Node) -> bool:
    """Return whether a value is computed from one that an operator has laid out in its own way."""
    waiting, seen = list(logical.all_input_nodes), set[fx.Node]()
    while waiting:
        node = waiting.pop()
        if node.meta.get("own layout"):
            return True
        if node not in seen:
            seen.add(node)
            waiting += node.all_input_nodes
    return False


def list_members(number: int, axis: MeshAxis, axis_sizes: Sequence[int]) -> list[int]:
    """Return the workers of a worker's group along an axis; the last axis is the innermost."""
    step = prod(axis_sizes[ROLES.index(axis.role) + 1 :])
    first = number - axis.rank * step
    return [first + step * rank for rank in range(axis.size)]


def call_collective(
    collective: Collective, pieces: list[Tensor], lengths: Sequence[tuple[int, ...]], rank: int
) -> Tensor | list[Tensor] | PendingShift:
    """Return what a collective gives to one rank."""
    if isinstance(collective, JointGather):
        parts = zip(collective.dims, collective.ranks, zip(*pieces, strict=True), lengths, strict=True)
        return [gather_on(own, dim, target == rank, sizes) for dim, target, own, sizes in parts]
    if isinstance(collective, StackingAllGather):
        return torch.stack(pieces)
    if isinstance(collective, RingShift):
        assert [piece.shape[collective.placement.dim] for piece in pieces] == list(lengths[0])
        return PendingShift(pieces[rank - 1].clone(memory_format=torch.contiguous_format))
    source, target = collective.source, collective.target
    if isinstance(source, OnRank):
        shape, lengths, whole = lengths[:1], lengths[1:], pieces[source.rank].contiguous()
        assert list(whole.shape) == list(shape[0]), "another shape than the other ranks expect"
    elif isinstance(source, BlockedShard):
        assert [piece.shape[source.dim] for piece in pieces] == list(lengths[0])
        whole = join_blocks(torch.cat(pieces, dim=source.dim), source.dim, source.lengths)
    elif isinstance(source, Shard):
        assert [piece.shape[source.dim] for piece in pieces] == list(lengths[0])
        whole = torch.cat(pieces, dim=source.dim)
    elif source.reduce_op == "sum":
        whole = torch.stack(pieces).sum(0).to(pieces[0].dtype)
    else:
        whole = reduce_extremum(torch.stack(pieces), source.reduce_op)
    if isinstance(target, OnRank):
        return whole.contiguous() if target.rank == rank else make_absent(whole)
    return slice_for_rank(whole, Shard(target.dim, lengths[-1]) if isinstance(target, Shard) else target, rank)


def gather_on(pieces: Sequence[Tensor], dim: int, is_target: bool, lengths: tuple[int, ...]) -> Tensor:
    """Return a value from all workers' pieces on its rank, and a tensor without rows on the others."""
    assert [piece.shape[dim] for piece in pieces] == list(lengths)
    whole = torch.cat(list(pieces), dim).contiguous()
    return whole if is_target else make_absent(whole)


def slice_for_rank(value: Tensor, placement: Placement, rank: int) -> Tensor:
    """Return one rank's piece."""
    return take_parts(value, list_parts((placement,), (rank,)))

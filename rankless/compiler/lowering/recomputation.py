"""Compute values of the forward pass again in the backward pass, so that they need no memory in between.

Note [recomputation]: the operators of a region, such as a block of layers, are computed a second time, just before the
backward pass first needs one of their values. Kept are the values that enter a region, and those that leave it, which
the rest of the forward pass needs too. Random numbers and results of collectives are kept as well: they are not drawn
and not sent a second time, so the program's results do not change. A dropout mask takes one byte per element.

The method is that of Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016). A script names regions by
`torch.utils.checkpoint`. With `recompute=` of a job the regions are the repeated blocks of its models, such as the
layers of a Transformer. A model without repeated blocks is cut into sections of about equal memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import ceil, sqrt
from operator import getitem

import torch
from torch import fx

from rankless.compiler.ir import (
    counter_distributions,
    counter_operators,
    custom_ops,
    local_kernels,
    memory_order,
    vocabulary_kernels,
)
from rankless.compiler.ir.logical_program import LogicalValue, is_fresh
from rankless.compiler.sharding.redistribute import Redistribution, count_bytes
from rankless.compiler.sharding.sharding_propagation import ShardedProgram
from rankless.parallel.mesh import Mesh
from rankless.parallel.tensor_placement import Replicate, Shard, compute_local_shape

Region = tuple[str, int]
"""A name, and the number of the call: the same block may run several times."""
SizeOf = Callable[[fx.Node], int]
"""Returns the bytes of a value that has memory of its own; 0 for a view."""

REPEATABLE = frozenset(
    (
        getitem,
        custom_ops.run_linear,
        custom_ops.run_linear_weight,
        custom_ops.run_recurrent,
        local_kernels.slice_dim,
        local_kernels.keep_on_rank_zero,
        local_kernels.apply_dropout,
        local_kernels.channel_moments,
        local_kernels.batch_norm,
        local_kernels.reduce_extremum,
        counter_distributions.draw,
        counter_operators.draw_mask,
        memory_order.order_memory,
        memory_order.repeat_memory,
        *vocabulary_kernels.PURE_KERNELS,
    )
)
"""Functions besides operators whose results depend on their arguments alone, and that change nothing."""


@dataclass(frozen=True)
class Recomputation:
    """Which values of a local graph are computed again.

    Args:
        regions: The region of each forward node that has one.
    """

    regions: Mapping[fx.Node, Region]

    def is_repeated(self, node: fx.Node) -> bool:
        """Return whether the backward pass computes a value again, if it needs it."""
        region = self.regions.get(node)
        if region is None or not is_repeatable(node):
            return False
        if node.target is getitem and not all(map(self.is_repeated, node.all_input_nodes)):
            return False
        # What later operators of the forward pass or the script read is there anyway.
        return all(user.meta.get("backward") or self.regions.get(user) == region for user in node.users)


def is_repeatable(node: fx.Node) -> bool:
    """Return whether a second run of a node computes the same and changes nothing."""
    if node.op != "call_function" or "collective" in node.meta or node.meta.get("kept"):
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return not node.target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in node.target.tags
    return node.target in REPEATABLE


def recompute(graph: fx.Graph, recomputation: Recomputation) -> None:
    """Let the backward pass of a local graph compute values again; see Note [recomputation].

    Args:
        graph: The graph, which is changed.
        recomputation: What to compute again.
    """
    if not recomputation.regions:
        return
    repeated = {node for node in recomputation.regions if recomputation.is_repeated(node)}
    copies: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        for value in node.all_input_nodes if node.meta.get("backward") else ():
            if value in repeated:
                node.replace_input_with(value, add_copy(graph, value, node, repeated, copies))


def add_copy(
    graph: fx.Graph, value: fx.Node, user: fx.Node, repeated: set[fx.Node], copies: dict[fx.Node, fx.Node]
) -> fx.Node:
    """Return the second computation of a value; add it, and that of what it needs, before `user`."""
    pending = [value]
    while pending:
        node = pending[-1]
        missing = [item for item in node.all_input_nodes if item in repeated and item not in copies]
        if node not in copies and missing:
            pending += missing
            continue
        pending.pop()
        if node not in copies:
            copies[node] = copy_node(graph, node, user, copies)
    return copies[value]


def copy_node(graph: fx.Graph, node: fx.Node, user: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Add a node that computes the same as another one, from second computations where there are any."""
    with graph.inserting_before(user):
        copy = graph.create_node(node.op, node.target)
    # Set the arguments afterwards: PyTorch warns about sizes among the arguments of a new node.
    copy.args, copy.kwargs = fx.node.map_arg((node.args, node.kwargs), lambda item: copies.get(item, item))
    copy.meta = {**node.meta, "backward": True, "repeats": node}
    return copy


def count_own_bytes(local: fx.Node, sharded: ShardedProgram, ranks: Sequence[int]) -> int:
    """Return the bytes of a local value that has memory of its own; 0 for a view, and for several values."""
    logical = local.meta.get("logical")
    if logical is None or not is_fresh(logical) or not isinstance(logical.meta["val"], LogicalValue):
        return 0
    shape = compute_local_shape(logical.meta["val"].shape, sharded.sharding(logical), ranks)
    return count_bytes(logical, shape)


def choose_regions(graph: fx.Graph, fraction: float, size_of: SizeOf) -> Recomputation:
    """Return the regions of a local graph.

    Args:
        graph: The graph.
        fraction: How much of what regions hold is computed again, from 0 to 1, besides the script's own checkpoints.
            The first regions of the forward pass are chosen.
        size_of: Gives sizes.
    """
    forward = [node for node in graph.nodes if node.op == "call_function" and not node.meta.get("backward")]
    regions: dict[fx.Node, Region] = {
        node: ("checkpoint", node.meta["checkpoint"]) for node in forward if node.meta.get("checkpoint") is not None
    }
    others = [node for node in forward if node not in regions]
    if fraction > 0 and any(node.meta.get("backward") for node in graph.nodes):
        regions |= limit_regions(choose_blocks(graph, others, size_of), fraction, size_of)
    return Recomputation(regions)


def choose_blocks(graph: fx.Graph, nodes: Sequence[fx.Node], size_of: SizeOf) -> dict[fx.Node, Region]:
    """Return the repeated blocks of modules that need the least memory; sections if there are no blocks."""
    candidates = [
        found for depth in range(1, count_depth(nodes)) if (found := find_blocks(nodes, depth)) and repeats(found)
    ] or [find_sections(nodes, size_of)]
    return min(candidates, key=lambda regions: estimate_peak(graph, Recomputation(regions), size_of))


def limit_regions(regions: Mapping[fx.Node, Region], fraction: float, size_of: SizeOf) -> dict[fx.Node, Region]:
    """Return the first regions, which have at least a fraction of the bytes of all."""
    order = list(dict.fromkeys(regions.values()))
    sizes = dict.fromkeys(order, 0)
    for node, region in regions.items():
        sizes[region] += size_of(node)
    before = [0, *accumulate(sizes[region] for region in order)]
    chosen = {region for region, start in zip(order, before, strict=False) if start < fraction * before[-1]}
    return {node: region for node, region in regions.items() if region in chosen}


def count_depth(nodes: Sequence[fx.Node]) -> int:
    """Return the most components that the path of a module has."""
    return max((len(find_path(node)) for node in nodes), default=0)


def find_path(node: fx.Node) -> Sequence[str]:
    """Return the components of the path of the module that computes a value; none outside of modules."""
    module = node.meta.get("module")
    return () if module is None else module.path.split(".")


def find_blocks(nodes: Sequence[fx.Node], depth: int) -> dict[fx.Node, Region]:
    """Return the numbered modules at a depth, as "model.layers.3", that have modules of their own, with their nodes.

    A block that uses a parameter a second time is in its next call.
    """
    inner: dict[str, set[Sequence[str]]] = {}
    for node in nodes:
        path = find_path(node)
        if len(path) > depth + 1 and path[depth].isdecimal():
            inner.setdefault(".".join(path[: depth + 1]), set()).add(tuple(path[depth + 1 :]))
    blocks = {block for block, paths in inner.items() if len(paths) > 1}
    regions: dict[fx.Node, Region] = {}
    calls: dict[str, int] = {}
    used: dict[str, set[tuple[str, fx.Node]]] = {}
    for node in nodes:
        block = ".".join(find_path(node)[: depth + 1])
        if block not in blocks:
            continue
        uses = {(str(node.target), item) for item in node.all_input_nodes if item.meta.get("kind") == "parameter"}
        if uses & used.setdefault(block, set()):
            calls[block] = calls.get(block, 0) + 1
            used[block] = set()
        used[block] |= uses
        regions[node] = (block, calls.get(block, 0))
    return regions


def repeats(regions: Mapping[fx.Node, Region]) -> bool:
    """Return whether regions are calls of several blocks, or several calls of one."""
    return len(set(regions.values())) > 1


def find_sections(nodes: Sequence[fx.Node], size_of: SizeOf) -> dict[fx.Node, Region]:
    """Return sections of a forward pass of about equal memory: as many as each has values."""
    sizes = [size_of(node) for node in nodes]
    count = ceil(sqrt(sum(size > 0 for size in sizes)))
    total = sum(sizes)
    if total == 0:
        return {}
    before = [0, *accumulate(sizes)]
    return {
        node: ("section", min(count - 1, start * count // total)) for node, start in zip(nodes, before, strict=False)
    }


@dataclass(frozen=True)
class KeptValues:
    """What the backward pass needs of the forward pass."""

    kept: frozenset[fx.Node]
    repeated: frozenset[fx.Node]


def find_kept(graph: fx.Graph, recomputation: Recomputation) -> KeptValues:
    """Return the values of a forward pass that stay in memory for the backward pass, and those computed again."""
    pending = [
        value
        for node in graph.nodes
        if node.meta.get("backward")
        for value in node.all_input_nodes
        if not value.meta.get("backward")
    ]
    kept, repeated = set[fx.Node](), set[fx.Node]()
    while pending:
        node = pending.pop()
        if node in kept or node in repeated:
            continue
        if recomputation.is_repeated(node):
            repeated.add(node)
            pending += node.all_input_nodes
        else:
            kept.add(node)
    return KeptValues(frozenset(kept), frozenset(repeated))


def estimate_peak(graph: fx.Graph, recomputation: Recomputation, size_of: SizeOf) -> int:
    """Return the bytes that are kept, and those of the largest region, which are there while it is computed again."""
    values = find_kept(graph, recomputation)
    largest: dict[Region, int] = {}
    for node in values.repeated:
        region = recomputation.regions[node]
        largest[region] = largest.get(region, 0) + size_of(node)
    owners = {owner for node in values.kept for owner in list_owners(node)}
    return sum(map(size_of, owners)) + max(largest.values(), default=0)


def list_owners(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the value whose memory a view has, or the value itself if it has its own."""
    while (logical := node.meta.get("logical")) is not None and not is_fresh(logical) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    yield node


def gather_again(graph: fx.Graph, sharded: ShardedProgram, mesh: Mesh) -> None:
    """Let the backward pass of a local graph gather activations again, if the program is sequence parallel.

    See Note [sequence parallelism].

    Args:
        graph: The graph, which is changed.
        sharded: The program.
        mesh: The mesh for which it was lowered.
    """
    if not sharded.logical.sequence_parallel:
        return
    axes = [mesh.axes[number] for number in sharded.list_state_axes()]
    for node in list(graph.nodes):
        users = [user for user in node.users if user.meta.get("backward")]
        is_kept = not users or len(users) == len(node.users) or node.meta.get("backward")
        if is_kept or not is_gather(node) or node.target.axis not in axes:
            continue
        copy = copy_node(graph, node, users[0], {})
        copy.meta["collective"] = replace(copy.meta["collective"], backward=True)
        for user in users:
            user.replace_input_with(node, copy)


def is_gather(node: fx.Node) -> bool:
    """Return whether a node gathers what is divided along a dim."""
    target = node.target
    return (
        isinstance(target, Redistribution) and isinstance(target.source, Shard) and isinstance(target.target, Replicate)
    )

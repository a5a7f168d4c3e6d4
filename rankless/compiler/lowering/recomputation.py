"""Compute values of the forward pass again in the backward pass, so that they need no memory in between.

Note [recomputation]: the operators of a region, such as a block of layers, are computed a second time, just before the
backward pass first needs one of their values. Kept are the values that enter a region, and those that leave it, which
the rest of the forward pass needs too. Random numbers and results of collectives are kept as well: they are not drawn
and not sent a second time, so the program's results do not change. A dropout mask takes one byte per element.

The method is that of Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016). Regions are the activation
checkpoints of the script, and those that `recomputed_regions` chooses.
"""

from collections.abc import Mapping
from dataclasses import dataclass
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

Region = tuple[str, int]
"""A name, and the number of the call: the same block may run several times."""

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

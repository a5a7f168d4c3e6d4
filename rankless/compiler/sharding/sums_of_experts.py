"""Sums of the results of experts, in an order in which few values move.

A loop over experts adds their results to a sum one after another. If each expert is on one rank, each result would have
to be moved to be added to what all ranks share. So the results of one rank's experts are added first, then those of all
ranks, as terms that are moved once, and then the rest.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import fx

from rankless.compiler.tracing.symbolic_sizes import is_same
from rankless.parallel.tensor_placement import OnRank, Placement

aten = torch.ops.aten

JOINED = "joined"
"""The mark of a sum that has been reordered."""


def join_sums_of_experts(graph: fx.Graph, placements: Mapping[fx.Node, Placement]) -> bool:
    """Reorder the sums of a logical graph that have results of experts among other terms. Return whether any was.

    Args:
        graph: The graph, which is changed. The final value of each sum keeps its node.
        placements: The placements of its values along one axis.
    """
    changed = False
    if not any(isinstance(placement, OnRank) for placement in placements.values()):
        return changed
    for node in list(graph.nodes):
        if not is_sum(node) or JOINED in node.meta or any(is_within(node, user) for user in node.users):
            continue
        terms = list(list_terms(node))
        owned = [term for term in terms if isinstance(placements.get(term), OnRank)]
        if 2 <= len(owned) < len(terms):
            changed |= reorder(graph, node, terms, owned, placements)
    return changed


def is_sum(node: fx.Node) -> bool:
    """Return whether a node adds two values of its own shape and dtype."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != len(node.args):
        return False
    value = node.meta["val"]
    inputs = [item.meta["val"] for item in node.all_input_nodes]
    return len(inputs) == 2 and all(item.dtype == value.dtype and is_same(item.shape, value.shape) for item in inputs)


def is_within(node: fx.Node, user: fx.Node) -> bool:
    """Return whether a sum is only a term of another one."""
    return is_sum(node) and len(node.users) == 1 and is_sum(user) and is_same_pass(node, user)


def is_same_pass(one: fx.Node, other: fx.Node) -> bool:
    """Return whether two operators belong to the same pass, forward or backward, and are computed again together."""
    return all(one.meta.get(name) == other.meta.get(name) for name in ("backward", "checkpoint"))


def list_terms(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the terms of a sum in their order."""
    for value in node.all_input_nodes:
        if is_within(value, node):
            yield from list_terms(value)
        else:
            yield value


def reorder(
    graph: fx.Graph,
    node: fx.Node,
    terms: Sequence[fx.Node],
    owned: Sequence[fx.Node],
    placements: Mapping[fx.Node, Placement],
) -> bool:
    """Let a sum add the results of experts first. Return whether this is possible.

    A sum lies in memory as its first term does, and it must lie as it did before: see Note [memory layout].

    Args:
        graph: The graph.
        node: The sum.
        terms: Its terms.
        owned: Those that single ranks have.
        placements: The placements of values.
    """
    groups: dict[Placement, list[fx.Node]] = {}
    for term in owned:
        groups.setdefault(placements[term], []).append(term)
    others, replaced = [term for term in terms if term not in owned], node.all_input_nodes
    parts = [[others], list(groups.values())]
    parts.sort(key=lambda part: lies_as(part[0][0], node), reverse=True)
    if not lies_as(parts[0][0][0], node):
        return False
    with graph.inserting_before(node):
        node.args = tuple(add_all(graph, node, [add_all(graph, node, group) for group in part]) for part in parts)
    node.meta[JOINED] = True
    remove_unused(graph, replaced)
    return True


def lies_as(term: fx.Node, node: fx.Node) -> bool:
    """Return whether two values of the same shape lie alike in memory."""
    return is_same(term.meta["val"].strides, node.meta["val"].strides)


def remove_unused(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Remove sums that nothing uses any more, and the sums within them."""
    for node in nodes:
        if is_sum(node) and not node.users:
            inputs = node.all_input_nodes
            graph.erase_node(node)
            remove_unused(graph, inputs)


def add_all(graph: fx.Graph, like: fx.Node, terms: Sequence[fx.Node]) -> fx.Node:
    """Add the sum of some terms to a graph, described like another one; it lies in memory as its first term does."""
    total = terms[0]
    for term in terms[1:]:
        total = graph.call_function(aten.add.Tensor, (total, term))
        total.meta.update(like.meta, val=terms[0].meta["val"])
    return total

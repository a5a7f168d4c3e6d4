"""Sequence parallelism: the axis that divides parameters divides the activations between layers too.

Note [sequence parallelism]: a layer whose weights are divided gives terms of a sum. Without sequence parallelism the
sum is whole on every worker, and so is all that is computed from it until the next divided layer: residual sums, norms,
dropout. With it each worker gets some rows of the sum, by a reduce-scatter, and computes those. The next layer gathers
them. Both together send what the sum sends. The rows are those of the longest dim, besides the features, that no other
axis divides: usually the positions. A divided parameter is then never gathered in place of an activation.

What a layer gathers for the forward pass is gathered again for the backward pass, so that it takes no memory between
them (`lowering.recomputation`).

This is the scheme of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from rankless.compiler.ir.logical_program import LogicalProgram, is_fresh
from rankless.compiler.rules.pattern import is_partial_sum
from rankless.parallel.tensor_placement import (
    BlockedShard,
    OnRank,
    Placement,
    Shard,
    is_divided_along,
    split_lengths,
)

aten = torch.ops.aten

LAYERS = (torch.ops.rankless.linear.default, aten.embedding.default, aten.mm.default, aten.addmm.default)
"""Operators whose results have features in the last dim, and rows in all others."""


def find_rows(node: fx.Node, placement: Placement, ranks: int, outer: Sequence[Placement]) -> Shard | None:
    """Return how the rows of a layer's result are divided between workers that have terms of it; None if they are not.

    Args:
        node: The layer.
        placement: The placement of its result.
        ranks: The number of workers.
        outer: The placements of its result along other axes.
    """
    if node.target not in LAYERS or not is_partial_sum(placement):
        return None
    shape = node.meta["val"].shape
    free = [
        dim
        for dim, size in enumerate(shape[:-1])
        if isinstance(size, int) and size >= ranks and not any(is_divided_along(item, dim) for item in outer)
    ]
    if not free:
        return None
    dim = max(free, key=lambda item: shape[item])
    return Shard(dim, split_lengths(shape[dim], ranks))


def find_divided_weights(program: LogicalProgram, given: Mapping[fx.Node, Placement]) -> dict[fx.Node, Placement]:
    """Return the divided parameters of a program, and views of them, with the placement of the parameter.

    Args:
        program: The program.
        given: The placements of its inputs along an axis.
    """
    found = {
        node: given[node]
        for node, described in program.inputs.items()
        if described.kind == "parameter" and isinstance(given[node], Shard | BlockedShard | OnRank)
    }
    for node in program.graph.nodes:
        is_view = isinstance(node.target, torch._ops.OpOverload) and not is_fresh(node)
        if is_view and len(node.all_input_nodes) == 1 and node.all_input_nodes[0] in found:
            found[node] = found[node.all_input_nodes[0]]
    return found

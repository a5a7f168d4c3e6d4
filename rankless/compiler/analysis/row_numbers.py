"""The numbers of a batch's rows, as `torch.arange(len(images))` counts them, which a job may use to select rows.

Losses select the score of each row's label so, as `scores[torch.arange(len(labels)), labels]`, and masks of attention
in the transformers library their rows. Split in time, a call has other numbers than the whole batch, but each row still
selects itself.
"""

from collections.abc import Mapping

import torch
from torch import fx

from rankless.compiler.analysis.batch_dim_kinds import (
    GROWTH_FACTOR,
    VIEW_OPS,
    BatchDimKind,
    BatchIndependent,
    BatchSharded,
    is_plain_rows,
    make_batch_shard,
)
from rankless.compiler.rules.strategy import logical_shape

aten = torch.ops.aten
ARANGE_OPS = (aten.arange.default, aten.arange.start, aten.arange.start_step)
RESHAPING_OPS = (aten.unsqueeze.default, aten.expand.default, aten.clone.default, *VIEW_OPS)
"""Operators that keep the elements as they are."""


def counts_rows(node: fx.Node, growth: list[float]) -> bool:
    """Return whether an operator returns the numbers of all rows, given how much its numbers grow with the rows."""
    first = node.args[0] if len(node.args) > 1 else 0
    step = node.args[2] if len(node.args) > 2 else 1
    return node.target in ARANGE_OPS and growth == [GROWTH_FACTOR] and (first, step) == (0, 1)


def find_selected_rows(
    node: fx.Node, counterpart: fx.Node, kinds: Mapping[fx.Node, BatchDimKind]
) -> BatchSharded | None:
    """Return the kind of a value that selects each row of another one by its number; None for any other value.

    Args:
        node: An operator that takes numbers of rows.
        counterpart: The same operator in the program of fewer rows.
        kinds: The kinds of the values before it.
    """
    if node.target is not aten.index.Tensor:
        return None
    source, indices = node.all_input_nodes[0], node.args[1]
    kind = kinds[source]
    assert isinstance(indices, list | tuple)
    found = {place: kinds[item] for place, item in enumerate(indices) if isinstance(item, fx.Node)}
    numbered = [place for place, item in found.items() if isinstance(item, BatchSharded) and item.is_number]
    others = [item for place, item in found.items() if place not in numbered]
    if not isinstance(kind, BatchSharded) or numbered != [kind.placement.dim]:
        return None
    if not all(isinstance(item, BatchIndependent) or is_plain_rows(item) for item in (kind, *others)):
        return None
    before = logical_shape(counterpart)
    grown = [dim for dim, size in enumerate(logical_shape(node)) if size != before[dim]]
    if len(grown) != 1:  # else all that has rows of the batch has them in this dim
        return None
    return BatchSharded(make_batch_shard(grown[0], logical_shape(node)[grown[0]]))

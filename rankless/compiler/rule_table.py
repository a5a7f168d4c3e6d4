"""The table of all sharding rules, and the operators that no placement makes correct."""

from typing import Any

import torch

from rankless.compiler.rules import (
    embeddings,
    images,
    indexing,
    linear_algebra,
    losses,
    matrices,
    normalizations,
    pointwise,
    random,
    reductions,
    views,
)
from rankless.compiler.rules.extension_operators import find_operator
from rankless.compiler.rules.strategy import AtenOperator, ShardingRule
from rankless.compiler.selected_rows import rules as selected_rows
from rankless.compiler.sequence_parallel import attention

aten = torch.ops.aten

SHARDING_RULES: dict[Any, ShardingRule] = {
    **views.RULES,
    **reductions.RULES,
    **matrices.RULES,
    **embeddings.RULES,
    **normalizations.RULES,
    **losses.RULES,
    **attention.RULES,
    **linear_algebra.RULES,
    **images.RULES,
    **indexing.RULES,
    **random.RULES,
    **pointwise.RULES,
    **selected_rows.RULES,
}

REFUSED_OPERATORS = {
    aten.as_strided.default: "it reads memory by strides, and a shard has other strides than the logical value",
    aten.as_strided_scatter.default: "it writes memory by strides",
}
"""Operators that are wrong even on gathered values."""


def find_rule(operator: AtenOperator) -> ShardingRule | None:
    """Return the rule of an operator, or None if it has to run replicated."""
    if operator in SHARDING_RULES:
        return SHARDING_RULES[operator]
    added = find_operator(operator)
    if added is not None:
        return added.rule
    return pointwise.pointwise_strategies if pointwise.is_pointwise(operator) else None

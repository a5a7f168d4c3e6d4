"""Add in place where a term is not needed again, as autograd does when it accumulates gradients.

The sum then needs no memory of its own, and is in the processor's cache.
"""

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def add_in_place(graph: fx.Graph) -> None:
    """Let the sums of a local graph overwrite a term that no later operator reads."""
    order = {node: position for position, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        terms = [item for item in node.args if isinstance(item, fx.Node)]
        if node.target is not aten.add.Tensor or node.kwargs or len(terms) < len(node.args):
            continue
        first, second = terms
        for term, other in ((first, second), (second, first)):
            is_last_use = all(order[user] <= order[node] for user in term.users)
            if term is not other and is_last_use and may_be_overwritten(term) and has_same_layout(term, node):
                node.target, node.args = aten.add_.Tensor, (term, other)
                break


def without_overwriting(target: Any) -> Any:
    """Return the operator that a sum in place was before; another one as it is."""
    return aten.add.Tensor if target is aten.add_.Tensor else target


def may_be_overwritten(value: fx.Node) -> bool:
    """Return whether a value has memory that nothing else refers to, besides operators that have read it."""
    return allocates(value.target) and "out" not in value.kwargs and all(allocates(user.target) for user in value.users)


def allocates(target: Any) -> bool:
    """Return whether a function is an operator whose results are never its arguments or views of them."""
    return isinstance(target, torch._ops.OpOverload) and not any(
        argument.alias_info is not None for argument in (*target._schema.arguments, *target._schema.returns)
    )


def has_same_layout(term: fx.Node, total: fx.Node) -> bool:
    """Return whether a term of a sum has the shape, strides and dtype of the sum."""
    if "logical" not in term.meta or "logical" not in total.meta:
        return False
    values = [node.meta["logical"].meta["val"] for node in (term, total)]
    # As texts, because a comparison of symbolic sizes would restrict the sizes for which the program is valid.
    layouts = [([*map(str, value.shape)], [*map(str, value.strides)], value.dtype) for value in values]
    return bool(layouts[0] == layouts[1])

"""Remove copies that a program does not need: its operators change no value in place."""

import torch
from torch import fx

from rankless.compiler.ir.logical_program import is_fresh
from rankless.compiler.tracing.symbolic_sizes import is_same

aten = torch.ops.aten


def skip_final_copy(node: fx.Node) -> fx.Node:
    """Return the value behind a result's last copy, if that value owns its memory and is no view."""
    if node.target is not aten.clone.default:
        return node
    (source,) = node.all_input_nodes
    return source if is_fresh(source) else node


def drop_copies(graph: fx.Graph) -> None:
    """Let operators take a copied value itself, as dropout with probability 0 copies it.

    A copy stays if its layout is another one, or if the program may return it or a view of it: what a program returns
    shares no memory.
    """
    for node in graph.nodes:
        if node.target is aten.clone.default and is_needless(node):
            node.replace_all_uses_with(node.args[0])


def is_needless(copy: fx.Node) -> bool:
    """Return whether a copy has the layout of its source, and only operators with memory of their own take it."""
    (source,) = copy.all_input_nodes
    value, copied = source.meta["val"], copy.meta["val"]
    return (
        is_fresh(source)
        and not copy.meta.get("kept")
        and not value.is_sparse
        and is_same(value.strides, copied.strides)
        and all(is_fresh(user) and user.target is not aten._unsafe_view.default for user in copy.users)
    )

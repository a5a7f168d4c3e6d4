"""Undo merged dims around `linear`.

`nn.MultiheadAttention` computes time-first, and merges time and batch before its output projection. A batch dim that is
merged behind another cannot be sharded. `linear` takes any leading dims, so the merge is not needed.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from rankless.compiler.ir.logical_program import LogicalValue

aten = torch.ops.aten
rankless_ops = torch.ops.rankless

VIEWS = (aten.view.default, aten._unsafe_view.default)


def unmerge_linears(graph: fx.Graph) -> None:
    """Let `linear`, and its gradients, take values whose leading dims are not merged to rows."""
    for node in list(graph.nodes):
        if node.target is rankless_ops.linear.default:
            unmerge_linear(node)
        elif node.target is rankless_ops.linear_weight.default:
            unmerge_weight_gradient(node)
        elif node.target is aten.sum.dim_IntList:
            unmerge_sum(node)


def unmerge_linear(node: fx.Node) -> None:
    """Merge the dims of the result instead of those of the input; views that divide them again need no merge."""
    value, view = node.meta["val"], find_merging_view(node.args[0])
    leading = None if view is None else find_leading_dims(view, node)
    if view is None or leading is None:
        return
    shape = (*leading, value.shape[-1])
    arguments = (unmerge(view, leading), *node.args[1:])
    wide = insert_call(node, node.target, arguments, make_contiguous(value, shape))
    merged = insert_call(node, aten.view.default, (wide, list(value.shape)), value)
    node.replace_all_uses_with(merged)
    for user in list(merged.users):
        if user.target in VIEWS and are_equal(user.meta["val"].shape, shape):
            user.replace_all_uses_with(wide)
        elif user.target in VIEWS:
            user.replace_input_with(merged, wide)


def unmerge_weight_gradient(node: fx.Node) -> None:
    """Compute a weight's gradient from unmerged values."""
    grad, x = (find_merging_view(argument) for argument in node.args)
    if grad is not None and x is not None:
        leading = find_leading_dims(grad) or find_leading_dims(x)
        if leading is not None:
            node.args = (unmerge(grad, leading), unmerge(x, leading))


def unmerge_sum(node: fx.Node) -> None:
    """Sum a bias's gradient over the unmerged dims instead of the merged one."""
    value, dims, *rest = node.args
    view = find_merging_view(value)
    leading = None if view is None else find_leading_dims(view)
    if view is None or leading is None or dims != [0] or any(rest) or node.kwargs.get("keepdim"):
        return
    node.args = (unmerge(view, leading), list(range(len(leading))), *rest)


def find_merging_view(value: Any) -> fx.Node | None:
    """Return a value if it is a view of more dims as rows and features; otherwise None."""
    if not isinstance(value, fx.Node) or value.target not in VIEWS:
        return None
    (source,) = value.all_input_nodes
    return value if len(value.meta["val"].shape) == 2 < len(source.meta["val"].shape) else None


def find_leading_dims(view: fx.Node, result: fx.Node | None = None) -> tuple[int, ...] | None:
    """Return the dims that a view merges to rows, from its source or from a view that divides the result again."""
    (source,) = view.all_input_nodes
    before, after = source.meta["val"].shape, view.meta["val"].shape
    if are_equal(before[-1:], after[-1:]):
        return tuple(before[:-1])
    if result is None:
        return None
    features = result.meta["val"].shape[-1:]
    divided = [tuple(user.meta["val"].shape) for user in result.users if user.target in VIEWS]
    return next((shape[:-1] for shape in divided if len(shape) > 2 and are_equal(shape[-1:], features)), None)


def unmerge(view: fx.Node, leading: tuple[int, ...]) -> fx.Node:
    """Return the value of a merging view with these leading dims in place of rows."""
    (source,) = view.all_input_nodes
    shape = (*leading, view.meta["val"].shape[-1])
    if are_equal(source.meta["val"].shape, shape):
        return source
    return insert_call(view, aten.view.default, (source, list(shape)), make_contiguous(view.meta["val"], shape))


def are_equal(first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
    """Compare shapes as text: comparing symbolic sizes would add guards."""
    return str(tuple(first)) == str(tuple(second))


def insert_call(before: fx.Node, target: Any, args: tuple[Any, ...], value: LogicalValue) -> fx.Node:
    """Insert an operator in front of a node, with that node's origin."""
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target)
    # Set the arguments afterwards: PyTorch warns about sizes among the arguments of a new node.
    node.args = args
    node.meta = {**before.meta, "val": value}
    return node


def make_contiguous(value: LogicalValue, shape: tuple[int, ...]) -> LogicalValue:
    """Return the value in another shape, contiguous."""
    strides: list[int] = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return replace(value, shape=shape, strides=tuple(strides))

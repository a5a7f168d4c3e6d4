"""Merge what a program computes twice to select rows, so that equal masks are one value.

Scripts write `x[chosen == expert]` and `weights[chosen == expert]` one after the other. The rows of both are divided
alike only if the program shows that the mask is the same; see Note [selections of divided rows].
"""

from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from rankless.compiler.ir.logical_program import LogicalProgram, LogicalValue, is_random_node
from rankless.compiler.tracing.row_counts import list_traced_counts

aten = torch.ops.aten
WRITES = (aten.index_put.default, aten.index_put_.default)


def merge_selections(program: LogicalProgram) -> None:
    """Merge equal masks and numbers of rows of a program, and let zeros that it writes to rows be one number."""
    values = [node.meta.get("val") for node in program.graph.nodes]
    if not any(list_traced_counts(size) for item in values if isinstance(item, LogicalValue) for size in item.shape):
        return
    known: dict[Any, fx.Node] = {}
    for node in list(program.graph.nodes):
        if node.target in WRITES and len(node.args) == 3:
            write_one_zero(node)
        if not is_discrete(node):
            continue
        leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
        key = (node.target, str(spec), tuple(item if isinstance(item, fx.Node) else repr(item) for item in leaves))
        first = known.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)


def is_discrete(node: fx.Node) -> bool:
    """Return whether a node computes truth values or whole numbers, in the same way each time."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple) else (value,)
    is_operator = node.target is getitem or (str(node.target).startswith("aten.") and not is_random_node(node))
    return is_operator and all(isinstance(item, LogicalValue) and is_whole_number(item.dtype) for item in values)


def is_whole_number(dtype: torch.dtype) -> bool:
    """Return whether a dtype is of truth values or whole numbers."""
    return not (dtype.is_floating_point or dtype.is_complex)


def write_one_zero(node: fx.Node) -> None:
    """Replace rows of zeros that a node writes by one zero, which needs no number of rows."""
    zeros = node.args[2]
    if not isinstance(zeros, fx.Node) or zeros.target is not aten.zeros.default:
        return
    value = zeros.meta["val"]
    with node.graph.inserting_before(node):
        zero = node.graph.call_function(aten.full.default, ([], 0), {"dtype": value.dtype, "device": value.device})
    zero.meta = {**zeros.meta, "val": LogicalValue((), (), value.dtype, value.device)}
    node.update_arg(2, zero)

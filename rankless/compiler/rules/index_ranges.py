"""Which index of a program is a range: 0, 1, 2, … along one of its dims, as `torch.arange(len(x))` in `x[range, y]`."""

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

RANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)
COPIES = (aten._to_copy.default, aten.clone.default, aten.alias.default, aten.lift_fresh_copy.default)
VIEWS = (aten.view.default, aten._unsafe_view.default)


def find_range_dim(node: fx.Node) -> int | None:
    """Return the dim along which a value counts from zero, equal along all other dims; None for any other value.

    The dim has more than one entry. Each value is known from the program, not from numbers.
    """
    value = node.meta["val"]
    if value.dtype not in (torch.int32, torch.int64):
        return None
    if node.target in RANGES:
        return 0 if is_from_zero_by_one(node) and value.shape[0] != 1 else None
    if node.op != "call_function" or not node.all_input_nodes:
        return None
    source = node.all_input_nodes[0]
    if node.target in COPIES:
        return find_range_dim(source)
    if node.target is aten.expand.default:
        dim = find_range_dim(source)
        return None if dim is None else dim + len(value.shape) - len(source.meta["val"].shape)
    if node.target is aten.unsqueeze.default:
        dim, added = find_range_dim(source), int(str(node.args[1])) % len(value.shape)
        return None if dim is None else dim + (added <= dim)
    if node.target in VIEWS:
        return find_viewed_dim(source, value.shape)
    return None


def is_from_zero_by_one(node: fx.Node) -> bool:
    """Return whether an `arange` starts at zero and counts by one."""
    if node.target is aten.arange.default:
        return True
    start, step = node.args[0], node.args[2] if len(node.args) > 2 else node.kwargs.get("step", 1)
    return isinstance(start, int) and isinstance(step, int) and (start, step) == (0, 1)


def find_viewed_dim(source: fx.Node, shape: Any) -> int | None:
    """Return the dim of a range after a view that only adds or drops dims of size one."""
    dim = find_range_dim(source)
    before = source.meta["val"].shape
    if dim is None or any(size != 1 for place, size in enumerate(before) if place != dim):
        return None
    long_dims = [place for place, size in enumerate(shape) if size != 1]
    return long_dims[0] if len(long_dims) == 1 else None

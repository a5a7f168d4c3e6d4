"""The order of a tensor's dims in memory.

Note [memory layout]: the layout is part of a value. Random operators draw in memory order, autograd chooses the
backward of `det` by strides, and a script sees the strides of a result. A program is therefore captured with the
layouts of its arguments, and what a collective has moved gets back the order of the value that was traced.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def find_memory_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """Return the dims from the slowest to the fastest in memory, or None for the order of contiguous memory.

    It is also None if elements overlap, as after `expand`: what is computed from such a value is contiguous.

    Args:
        shape: The sizes of the dims.
        strides: Their strides, in elements.
    """
    if all(map(int.__ge__, strides, strides[1:])):
        return None
    if any(stride == 0 and size > 1 for size, stride in zip(shape, strides, strict=True)):
        return None
    # The strides of dims of size one count too: a rank with one row must find the order of a rank with many.
    return tuple(sorted(range(len(strides)), key=strides.__getitem__, reverse=True))


def invert(order: Sequence[int]) -> list[int]:
    """Return the permutation that undoes `order`."""
    return sorted(range(len(order)), key=order.__getitem__)


def order_memory(value: Tensor, order: Sequence[int]) -> Tensor:
    """Return a value with the same elements whose dims lie in memory in the given order."""
    return value.permute(*order).contiguous().permute(invert(order))


def find_repeated_dims(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return the dims along which a value repeats the same memory, as after `expand`."""
    return tuple(dim for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)) if size > 1 and stride == 0)


def repeat_memory(value: Tensor, repeated: Sequence[int], order: Sequence[int] | None) -> Tensor:
    """Return a value with the same elements that repeats its memory along some dims, the others in the given order."""
    once = value
    for dim in repeated:
        once = once.narrow(dim, 0, min(1, once.shape[dim]))  # a rank without rows has none to repeat
    once = once.contiguous() if order is None else order_memory(once, order)
    return once.expand(value.shape)


def make_empty(
    shape: Sequence[int], order: Sequence[int] | None, *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return an uninitialized tensor whose dims lie in memory in the given order."""
    if order is None:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    return torch.empty([shape[dim] for dim in order], dtype=dtype, device=device).permute(invert(order))

"""Blobs: a blob is a `torch.Tensor`, and a dtype is PyTorch's own."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["double", "float", "float16", "float32", "float64", "int8", "int32", "int64", "reshape", "uint8"]

float16, float32, float64 = torch.float16, torch.float32, torch.float64
float, double = torch.float32, torch.float64
int8, int32, int64, uint8 = torch.int8, torch.int32, torch.int64, torch.uint8


def reshape(x: Tensor, shape: Sequence[int], name: str | None = None) -> Tensor:
    """Return a blob with the elements of `x` in another shape; one size may be -1."""
    del name
    return torch.reshape(x, tuple(shape))

"""Adaptive summation of gradients: parallel gradients are averaged, orthogonal gradients are added.

Source: S. Maleki et al., "Scaling Distributed Training with Adaptive Summation" (2020). Ranks are combined in pairs,
then pairs of pairs, separately for each tensor.
"""

from collections.abc import Sequence

import torch


def adasum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the adaptive sum of one tensor's values on all ranks, with products in float64.

    The number of ranks is a power of 2.
    """
    if len(tensors) == 1:
        return tensors[0]
    middle = len(tensors) // 2
    one, other = adasum(tensors[:middle]), adasum(tensors[middle:])
    left, right = one.double().reshape(-1), other.double().reshape(-1)
    product, left_square, right_square = left @ right, left @ left, right @ right
    left_factor = 1 - product / (2 * left_square) if left_square else torch.ones_like(product)
    right_factor = 1 - product / (2 * right_square) if right_square else torch.ones_like(product)
    return (left_factor * left + right_factor * right).reshape(one.shape).to(one.dtype)

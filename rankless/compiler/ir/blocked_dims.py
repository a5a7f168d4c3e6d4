"""Kernels for values of which a rank has its rows of every block of a dim; see Note [dims of several blocks]."""

from collections.abc import Sequence

import torch
from torch import Tensor


def slice_blocks(value: Tensor, dim: int, block: int, start: int, length: int) -> Tensor:
    """Return rows `start` to `start + length` of each block of a dim, one block after the other.

    Args:
        value: A tensor whose `dim` consists of blocks.
        dim: The dim.
        block: The number of rows of a block.
        start: The first row, counted within a block.
        length: The number of rows of a block to take.
    """
    apart: Tensor = value.unflatten(dim, (-1, block))
    return apart.narrow(dim + 1, start, length).flatten(dim, dim + 1)


def join_blocks(gathered: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
    """Return a whole value from the pieces of all ranks, one after the other along a dim.

    Args:
        gathered: The pieces.
        dim: The dim.
        lengths: The rows that each rank has of one block.
    """
    blocks = gathered.shape[dim] // sum(lengths)
    pieces = gathered.split([blocks * length for length in lengths], dim)
    apart = [piece.unflatten(dim, (blocks, length)) for piece, length in zip(pieces, lengths, strict=True)]
    return torch.cat(apart, dim + 1).flatten(dim, dim + 1)

"""Kernels for values of which a rank has its rows of every block of a dim; see Note [dims of several blocks]."""

from collections.abc import Sequence

import torch
from torch import Tensor


def slice_blocks(value: Tensor, dim: int, blocks: int, start: int, length: int) -> Tensor:
    """Return rows `start` to `start + length` of each of the blocks of a dim, one block after the other.

    Args:
        value: A tensor whose `dim` has `blocks` times as many rows as a block.
        dim: The dim.
        blocks: The number of blocks.
        start: The first row, counted within a block.
        length: The number of rows of a block.
    """
    apart: Tensor = value.unflatten(dim, (blocks, -1))
    return apart.narrow(dim + 1, start, length).flatten(dim, dim + 1)


def join_blocks(gathered: Tensor, dim: int, blocks: int, lengths: Sequence[int]) -> Tensor:
    """Return a whole value from the pieces of all ranks, one after the other along a dim.

    Args:
        gathered: The pieces. That of rank r has `blocks * lengths[r]` rows along `dim`.
        dim: The dim.
        blocks: The number of blocks.
        lengths: The rows that each rank has of one block.
    """
    pieces = gathered.split([blocks * length for length in lengths], dim)
    return torch.cat([piece.unflatten(dim, (blocks, -1)) for piece in pieces if piece.shape[dim]], dim + 1).flatten(
        dim, dim + 1
    )

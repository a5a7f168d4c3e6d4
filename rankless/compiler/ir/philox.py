"""Random bits as a function of a key and of the number of an element: Philox4x32-10, in PyTorch's integer operators.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A block is 128 bits, that is four
words of 32 bits. Words are held in int64 tensors, because PyTorch has no arithmetic on uint32.

Note [logical blocks]: element i of a logical tensor in row-major order, whatever its memory layout, takes its words
from block i // n, where n elements share a block. A rank with a part of the tensor computes only the blocks of that
part.

Note [equal bits]: a vectorized kernel of PyTorch may compute the last elements of a tensor, which do not fill a vector,
by other code than the rest, and round them otherwise. So the CPU computes blocks in chunks that fill all vectors, each
by one thread. Then an element has the same bits at every place of every part.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from rankless.compiler.ir.tensor_parts import Part, take_parts

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
CPU_CHUNK_BLOCKS = 2**14
"""Blocks computed at once on a CPU: its values stay in the cache, and one thread computes each operator."""
GPU_CHUNK_BLOCKS = 2**24
VECTOR_BLOCKS = 64
"""A chunk has a multiple of this number of blocks; see Note [equal bits]."""


@dataclass(frozen=True)
class Sampler:
    """Turns the words of blocks into samples.

    `convert` takes the four words of n blocks, each a tensor of shape (n,), and returns one such tensor for each of the
    `elements_per_block` elements of a block.
    """

    elements_per_block: int
    dtype: torch.dtype
    convert: Callable[[Sequence[Tensor]], Sequence[Tensor]]


def philox(counter: Sequence[Tensor], key: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four output words of Philox4x32-10.

    Args:
        counter: Four int64 tensors of one shape, with values from 0 to 2**32 - 1.
        key: Two numbers from 0 to 2**32 - 1.
    """
    x0, x1, x2, x3 = counter
    key0, key1 = key
    # Products of two words overflow int64 to the right 64 bits. x1 and x3 keep bits above the lower 32 until the end.
    product0, product1 = torch.empty_like(x0), torch.empty_like(x0)
    for number in range(ROUNDS):
        spare0, spare1 = (x0, x2) if number else (torch.empty_like(x0), torch.empty_like(x0))
        torch.mul(x0, MULTIPLIERS[0], out=product0)
        torch.mul(x2, MULTIPLIERS[1], out=product1)
        torch.bitwise_right_shift(product1, 32, out=spare0).bitwise_xor_(x1).bitwise_xor_(key0).bitwise_and_(MASK)
        torch.bitwise_right_shift(product0, 32, out=spare1).bitwise_xor_(x3).bitwise_xor_(key1).bitwise_and_(MASK)
        free1, free3 = (x1, x3) if number else (torch.empty_like(x0), torch.empty_like(x0))
        x0, x1, x2, x3 = spare0, product1, spare1, product0
        product0, product1 = free1, free3
        key0, key1 = (key0 + KEY_INCREMENTS[0]) & MASK, (key1 + KEY_INCREMENTS[1]) & MASK
    return x0, x1.bitwise_and_(MASK), x2, x3.bitwise_and_(MASK)


def draw_elements(
    sampler: Sampler, key: int, shape: Sequence[int], parts: Sequence[Part], device: torch.device
) -> Tensor:
    """Return the samples of a part of a logical tensor, contiguous.

    Of several ranges, the first decides which samples are computed; the others are cut from these.

    Args:
        sampler: The distribution.
        key: The key of this tensor, from 0 to 2**64 - 1.
        shape: The shape of the logical tensor.
        parts: The part to return, as ranges of different dims; none for the whole.
        device: Where to compute it.
    """
    if len(parts) > 1:
        return take_parts(draw_elements(sampler, key, shape, parts[:1], device), parts[1:]).contiguous()
    dim, start, length = parts[0] if parts else (0, 0, shape[0] if shape else 1)
    local_shape = [*shape[:dim], length, *shape[dim + 1 :]] if shape else []
    if prod(local_shape) == 0:
        return torch.empty(local_shape, dtype=sampler.dtype, device=device)
    # In row-major order the part is `ranges` ranges of `size` elements; they begin at `first` and `stride` apart.
    inner = prod(shape[dim + 1 :])
    ranges, stride = prod(shape[:dim]), (shape[dim] if shape else 1) * inner
    first, size = start * inner, length * inner
    shared = sampler.elements_per_block
    is_aligned = ranges == 1 or stride % shared == 0
    offset = first % shared
    blocks = -(-(offset + size) // shared) if is_aligned else (size + 2 * shared - 2) // shared
    if ranges > 1 and ranges * blocks * shared >= ranges * stride:
        return draw_elements(sampler, key, shape, (), device).narrow(dim, start, length).contiguous()
    starts = torch.arange(ranges, device=device).mul_(stride).add_(first)
    numbers = starts.div(shared, rounding_mode="floor").unsqueeze(1) + torch.arange(blocks, device=device)
    drawn = draw_blocks(sampler, key, numbers.view(-1)).view(ranges, blocks * shared)
    if is_aligned:
        return drawn.narrow(1, offset, size).reshape(local_shape).contiguous()
    places = starts.remainder_(shared).unsqueeze(1) + torch.arange(size, device=device)
    return drawn.gather(1, places).view(local_shape)


def draw_blocks(sampler: Sampler, key: int, numbers: Tensor) -> Tensor:
    """Return the samples of the blocks with these numbers, of shape (blocks, elements per block)."""
    count, device = numbers.shape[0], numbers.device
    drawn = torch.empty(count, sampler.elements_per_block, dtype=sampler.dtype, device=device)
    chunk_blocks = CPU_CHUNK_BLOCKS if device.type == "cpu" else GPU_CHUNK_BLOCKS
    for begin in range(0, count, chunk_blocks):
        chunk = numbers[begin : begin + chunk_blocks]
        found = chunk.shape[0]
        if found % VECTOR_BLOCKS:
            chunk = torch.cat([chunk, chunk.new_zeros(-found % VECTOR_BLOCKS)])
        zero = torch.zeros_like(chunk)
        words = philox((chunk & MASK, chunk >> 32, zero, zero), (key & MASK, key >> 32))
        for place, samples in enumerate(sampler.convert(words)):
            drawn[begin : begin + found, place] = samples[:found]
    return drawn

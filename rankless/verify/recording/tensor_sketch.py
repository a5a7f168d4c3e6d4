"""Tensors in a few numbers, of which the differences tell how far two tensors are apart.

# Note [sketches]: whole tensors of every step would fill disks, so a step keeps 16 numbers of each: its
# elements times fixed random signs, drawn from its size, summed over every 16th. The sketch is linear, and
# the expected square of a sketch's length is the tensor's. So the length of the difference of two sketches
# tells how far two tensors are apart, though they never meet (the count sketch of Charikar, Chen and
# Farach-Colton, 2002, with buckets by stride).
"""

import torch
from torch import Tensor

from rankless.records.job_results import TensorSummary

BUCKETS = 16


class Sketcher:
    """Makes summaries; the signs of each size are drawn once."""

    def __init__(self) -> None:
        self._signs: dict[int, Tensor] = {}

    def of(self, tensor: Tensor) -> TensorSummary:
        """The norm and the sketch of a tensor."""
        flat = widen(tensor).reshape(-1).double()
        signs = self._signs.get(flat.numel())
        if signs is None or signs.device != flat.device:
            signs = self._signs[flat.numel()] = draw_signs(flat.numel()).to(flat.device)
        padded = torch.nn.functional.pad(flat * signs, (0, -flat.numel() % BUCKETS))
        sums = padded.reshape(-1, BUCKETS).sum(dim=0)
        return TensorSummary(float(flat.norm()), tuple(sums.tolist()))


def widen(tensor: Tensor) -> Tensor:
    """A tensor's numbers as float64, or int64 where they are whole: what numpy can read for every dtype."""
    plain = tensor.detach()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    return plain.to(torch.float64 if plain.is_floating_point() else torch.int64).contiguous()


def draw_signs(count: int) -> Tensor:
    """As many signs, always the same for a number."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, 2, (count,), generator=generator, dtype=torch.int8) * 2 - 1

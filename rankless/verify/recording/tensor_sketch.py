"""Sketches: tensors in a few numbers whose differences estimate how far two tensors are apart.

Note [sketches]: whole tensors of every step would fill disks, so a step keeps 16 numbers of each tensor. They are its
elements times fixed random signs, seeded by the size, summed over every 16th element. The sketch is linear, and the
expected square of its length is the square of the tensor's norm. The length of the difference of two sketches therefore
estimates the distance of two tensors that are never in one place. This is the count sketch of Charikar, Chen and
Farach-Colton (2002) with buckets by stride.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rankless.records.verify_recording_format import TensorSummary

BUCKETS = 16


class Sketcher:
    """Computes summaries; draws the signs of each size once."""

    def __init__(self) -> None:
        self._signs: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

    def sketch(self, tensor: Tensor) -> TensorSummary:
        """Return the norm and the sketch of a tensor."""
        flat = gather_dense(tensor).reshape(-1)
        if not flat.is_floating_point() or flat.dtype.itemsize == 1:
            flat = flat.double()  # no product with a sign is defined in 8 bits
        key = (flat.numel(), flat.dtype, flat.device)
        if key not in self._signs:
            self._signs[key] = draw_signs(flat.numel()).to(flat.device, flat.dtype)
        # A product with a sign is exact in every dtype, and ten times as fast in the tensor's own as in a mixture.
        signed = (flat * self._signs[key]).double()
        rest = signed.numel() % BUCKETS
        sums = signed[: signed.numel() - rest].view(-1, BUCKETS).sum(dim=0)
        sums[:rest] += signed[signed.numel() - rest :]
        return TensorSummary(float(signed.norm()), tuple(sums.tolist()))


def widen(tensor: Tensor) -> Tensor:
    """Return a tensor's numbers as float64, or int64 for integers: NumPy reads both for every dtype.

    Those of a tensor that PyTorch distributes, as `fully_shard` does, are gathered: all ranks call this.
    """
    plain = gather_dense(tensor)
    return plain.to(torch.float64 if plain.is_floating_point() else torch.int64).contiguous()


def gather_dense(tensor: Tensor) -> Tensor:
    """Return a tensor's numbers, those of a distributed one whole, of a sparse one dense, and of a complex one real."""
    plain = tensor.detach()
    if isinstance(plain, DTensor):
        plain = plain.full_tensor()
    if plain.layout != torch.strided:  # a sparse gradient, of `nn.Embedding(sparse=True)`
        plain = plain.to_dense()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    return plain


def draw_signs(count: int) -> Tensor:
    """Return random signs that depend only on their number."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, 2, (count,), generator=generator, dtype=torch.int8, device="cpu") * 2 - 1

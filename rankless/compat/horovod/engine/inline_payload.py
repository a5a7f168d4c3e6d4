"""Small tensors whose values travel with the negotiation: their bytes, and their reduction on rank 0."""

from collections.abc import Sequence

import torch

from rankless.compat.horovod.engine.messages import Request
from rankless.compat.horovod.engine.requests import Kind, Reduction, Submission
from rankless.compat.horovod.engine.scaling import DTYPES, Reducing

MOST_BYTES = 1 << 16
MOST_BYTES_OF_ALL = 1 << 18
"""What rank 0 takes in and gives out for one operation, at most."""


def rides(submissions: Sequence[Submission], size: int) -> bool:
    """Whether the values of these submissions travel in their messages: one that is no group's, or all of a group."""
    if size == 1 or any(not _may_ride(one) for one in submissions):
        return False
    count = sum(one.tensor.numel() * one.tensor.element_size() for one in submissions if one.tensor is not None)
    return count <= min(MOST_BYTES, MOST_BYTES_OF_ALL // size)


def _may_ride(one: Submission) -> bool:
    return (
        one.kind is Kind.ALLREDUCE
        and one.may_ride
        and one.tensor is not None
        and one.tensor.device.type == "cpu"
        and one.reduction is not Reduction.ADASUM
    )


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The values of a contiguous tensor on the CPU."""
    if not tensor.numel():
        return b""
    return bytes(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def put(values: bytes | memoryview, output: torch.Tensor) -> None:
    """Write values into a contiguous tensor on the CPU."""
    if output.numel():
        output.detach().reshape(-1).copy_(torch.frombuffer(bytearray(values), dtype=output.dtype))


def combine(request: Request, values: Sequence[bytes], size: int) -> bytes:
    """The values reduced, in the order in which they are given: for all ranks the same bits.

    Ranks that have joined give none, and count as zeros.
    """
    if not values[0]:
        return b""
    dtype = DTYPES[request.dtype]
    reducing = Reducing(Reduction(request.reduction), request.prescale, request.postscale, size)
    tensors = [reducing.before(torch.frombuffer(bytearray(one), dtype=dtype)) for one in values]
    if len(tensors) < size:
        tensors.append(torch.zeros_like(tensors[0]))
    total = tensors[0]
    for other in tensors[1:]:
        total = reducing.combine(total, other)
    return bytes_of(reducing.after(total))

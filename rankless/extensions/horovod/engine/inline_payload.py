"""Small tensors whose values are sent with the request: their bytes, and their reduction on rank 0."""

from collections.abc import Sequence

import torch

from rankless.extensions.horovod.engine.messages import RequestMetadata
from rankless.extensions.horovod.engine.requests import EngineRequest, OperationKind, ReduceOpCode
from rankless.extensions.horovod.engine.scaling import DTYPES, ScaledReduction

MAX_BYTES = 1 << 16
MAX_TOTAL_BYTES = 1 << 18
"""How many bytes rank 0 receives from all ranks, and sends to them, for one operation at most."""


def fits_inline(requests: Sequence[EngineRequest], size: int) -> bool:
    """Whether the values of these requests are sent inline: one request outside a group, or all of a group."""
    if size == 1 or any(not _can_be_inline(request) for request in requests):
        return False
    count = sum(one.tensor.numel() * one.tensor.element_size() for one in requests if one.tensor is not None)
    return count <= min(MAX_BYTES, MAX_TOTAL_BYTES // size)


def _can_be_inline(request: EngineRequest) -> bool:
    return (
        request.kind is OperationKind.ALLREDUCE
        and request.allow_inline
        and request.tensor is not None
        and request.tensor.device.type == "cpu"
        and request.reduction is not ReduceOpCode.ADASUM
    )


def tensor_to_bytes(tensor: torch.Tensor) -> bytes:
    """Return the values of a contiguous tensor on the CPU."""
    if not tensor.numel():
        return b""
    return bytes(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def write_bytes(values: bytes | memoryview, output: torch.Tensor) -> None:
    """Copy values into a contiguous tensor on the CPU."""
    if output.numel():
        output.detach().reshape(-1).copy_(torch.frombuffer(bytearray(values), dtype=output.dtype))


def combine(request: RequestMetadata, values: Sequence[bytes], size: int) -> bytes:
    """Reduce the values in the given order, so that all ranks get the same bits.

    Ranks that have joined give no values, and count as zeros.
    """
    if not values[0]:
        return b""
    dtype = DTYPES[request.dtype]
    reduction = ScaledReduction(ReduceOpCode(request.reduction), request.prescale, request.postscale, size)
    tensors = [reduction.apply_prescale(torch.frombuffer(bytearray(one), dtype=dtype)) for one in values]
    if len(tensors) < size:
        tensors.append(torch.zeros_like(tensors[0]))
    total = tensors[0]
    for other in tensors[1:]:
        total = reduction.combine(total, other)
    return tensor_to_bytes(reduction.finish(total))

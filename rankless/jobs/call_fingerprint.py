"""A job's call in a few bytes, by which ranks tell that they make the same one.

Note [cheap digests]: a call's values are sampled: 256 pieces of 64 bytes of every tensor, spread evenly, or all of one
that is no larger. Ranks that read different batches differ everywhere; the few that differ in one element only are
found by `check_synchronized_every`, which compares models. A batch of a loader is not looked at: its digest is that of
the indices of all its samples, which every rank knows. Values on a GPU are not looked at either: that would wait.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rankless.compiler.tracing.plain_values import PLAIN_TYPES
from rankless.data.logical_tensor import LogicalTensor
from rankless.jobs.arguments import TENSOR, Arguments, find_leaf_paths

PIECES = 256
PIECE_BYTES = 64
GENERATOR = "state of torch's random generator"


def format_call(job: str, call: int, arguments: Arguments) -> str:
    """What a call is: the job, its number, the shapes of tensors, plain values."""
    tensors = iter(arguments.tensors)
    leaves = [format_tensor(next(tensors)) if leaf is TENSOR else format_plain(leaf) for leaf in arguments.plain]
    return f"call {call} of job {job!r} with {', '.join(leaves) or 'no arguments'}"


def format_tensor(tensor: Tensor) -> str:
    """A tensor's dtype and logical shape, as float32[8, 3]."""
    return f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"


def format_plain(value: Any) -> str:
    """A plain value; of what has an address in its text, only the type."""
    return repr(value) if isinstance(value, PLAIN_TYPES) else type(value).__qualname__


def name_tensors(function: Callable[..., Any], arguments: Arguments) -> list[str]:
    """What the function calls its tensor arguments: "images", "batch['ids']"."""
    paths = find_leaf_paths(function, arguments)
    return [name + rest for (name, rest), leaf in zip(paths, arguments.plain, strict=True) if leaf is TENSOR]


def fingerprint_tensors(tensors: Sequence[Tensor]) -> list[int]:
    """A digest of each tensor's values, equal on all ranks that are given the same."""
    return [fingerprint_tensor(tensor) for tensor in tensors]


def fingerprint_tensor(tensor: Tensor) -> int:
    """A digest of a tensor's values; see the note at the top."""
    if isinstance(tensor, LogicalTensor):
        return tensor.fingerprint
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.numel() == 0:
        return 0
    plain = tensor.detach()
    while not plain.is_contiguous() and plain.dim() > 1:
        plain = plain[plain.shape[0] // 2]
    data = plain.contiguous().reshape(-1).view(torch.uint8).numpy()
    if data.nbytes <= PIECES * PIECE_BYTES:
        return zlib.crc32(data.data)
    stride = data.nbytes // PIECES
    return zlib.crc32(data[: stride * PIECES].reshape(PIECES, stride)[:, :PIECE_BYTES].tobytes())


def fingerprint_generator() -> int:
    """A digest of the state of torch's generator on the CPU."""
    return zlib.crc32(torch.default_generator.get_state().numpy().data)

"""Fingerprint a job's call in a few bytes, so that ranks can check that they make the same call.

Note [cheap fingerprints]: a tensor's fingerprint samples 256 evenly spaced pieces of 64 bytes, or all of a smaller
tensor. Ranks that read different batches differ everywhere, so the sample shows it. A difference in single elements is
left to `check_synchronized_every`, which compares models. The fingerprint of a loader's batch comes from the indices of
all its samples, which every rank knows. Tensors on a GPU are not read, because that would synchronize with the GPU.
"""

import pickle
import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from rankless.compiler.tracing.value_snapshots import PLAIN_TYPES
from rankless.data.logical_tensor import LogicalTensor
from rankless.jobs.arguments import TENSOR, FlattenedArguments, find_leaf_paths

PIECES = 256
PIECE_BYTES = 64
GENERATOR = "state of torch's random generator"


def format_call(job: str, call: int, arguments: FlattenedArguments) -> str:
    """Describe a call: the job, its number, the shapes of tensors, plain values."""
    tensors = iter(arguments.tensors)
    leaves = [format_tensor(next(tensors)) if leaf is TENSOR else format_plain(leaf) for leaf in arguments.plain]
    return f"call {call} of job {job!r} with {', '.join(leaves) or 'no arguments'}"


def format_tensor(tensor: Tensor) -> str:
    """Return a tensor's dtype and logical shape, as "float32[8, 3]"."""
    return f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"


def format_plain(value: Any) -> str:
    """Return the `repr` of a simple value, and only the type of any other, whose text could hold an address."""
    return repr(value) if isinstance(value, PLAIN_TYPES) else type(value).__qualname__


def name_tensors(function: Callable[..., Any], arguments: FlattenedArguments) -> list[str]:
    """Return the function's names of its tensor arguments: "images", "batch['ids']"."""
    paths = find_leaf_paths(function, arguments)
    return [name + rest for (name, rest), leaf in zip(paths, arguments.plain, strict=True) if leaf is TENSOR]


def fingerprint_tensors(tensors: Sequence[Tensor]) -> list[int]:
    """Return a fingerprint of each tensor's values, equal on all ranks with the same values."""
    return [fingerprint_tensor(tensor) for tensor in tensors]


def fingerprint_tensor(tensor: Tensor) -> int:
    """Return a fingerprint of a tensor's values; see Note [cheap fingerprints]."""
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


class RandomStates:
    """The random generators that a job may draw from.

    Args:
        generators: Generators of the script, besides PyTorch's own.
        with_python: Include the generators of Python's `random` and of NumPy.
    """

    def __init__(self, generators: Sequence[torch.Generator] = (), *, with_python: bool = False) -> None:
        self._generators = generators
        self._with_python = with_python

    def fingerprint(self) -> dict[str, int]:
        """Return a fingerprint of each generator's state, by name."""
        found = {GENERATOR: zlib.crc32(torch.default_generator.get_state().numpy().data)}
        for number, generator in enumerate(self._generators):
            found[f"state of generator {number} of the script"] = zlib.crc32(generator.get_state().numpy().data)
        if self._with_python:
            found["state of Python's random module"] = hash(random.getstate()[1]) % 2**64
            state = numpy.random.get_state(legacy=False)
            found["state of NumPy's random generator"] = zlib.crc32(pickle.dumps(state))
        return found

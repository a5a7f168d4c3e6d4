"""Initial values of variables. They depend on the variable's name alone, so they are the same on all workers.

A variable's generator has the first 8 bytes of the SHA-256 digest of its name as its seed.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "constant_initializer",
    "random_normal_initializer",
    "random_uniform_initializer",
    "truncated_normal",
    "truncated_normal_initializer",
    "xavier_uniform_initializer",
]


@dataclass(frozen=True)
class Initializer:
    """How the values of a variable begin."""

    fill: Callable[[Tensor, torch.Generator], object]
    """Writes the values in place."""

    def make_values(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the values of the variable of that name, on the CPU."""
        digest = hashlib.sha256(name.encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") % 2**63)
        values = torch.empty(tuple(shape), dtype=dtype)
        with torch.no_grad():
            self.fill(values, generator)
        return values


def constant_initializer(value: float = 0) -> Initializer:
    """Return an initializer of equal values."""
    return Initializer(lambda values, _generator: values.fill_(value))


def truncated_normal_initializer(mean: float = 0.0, stddev: float = 1.0) -> Initializer:
    """Return an initializer of normal values within two standard deviations of the mean."""
    low, high = mean - 2 * stddev, mean + 2 * stddev
    return Initializer(
        lambda values, generator: torch.nn.init.trunc_normal_(values, mean, stddev, low, high, generator=generator)
    )


def truncated_normal(stddev: float = 1.0) -> Initializer:
    """Return an initializer of normal values around 0, within two standard deviations."""
    return truncated_normal_initializer(0.0, stddev)


def random_normal_initializer(mean: float = 0.0, stddev: float = 1.0) -> Initializer:
    """Return an initializer of normal values."""
    return Initializer(lambda values, generator: values.normal_(mean, stddev, generator=generator))


def random_uniform_initializer(minval: float = 0, maxval: float = 1) -> Initializer:
    """Return an initializer of values that are equally likely between two bounds."""
    return Initializer(lambda values, generator: values.uniform_(minval, maxval, generator=generator))


def xavier_uniform_initializer(data_format: str = "") -> Initializer:
    """Return Glorot's uniform initializer."""
    del data_format  # only NCHW is here, whose order is that of PyTorch's kernels
    return Initializer(lambda values, generator: values.uniform_(-_bound(values), _bound(values), generator=generator))


def _bound(values: Tensor) -> float:
    """Return the bound of Glorot's uniform values: the root of 6 / (inputs + outputs)."""
    field = math.prod(values.shape[2:])
    inputs = values.shape[1] if values.dim() > 1 else values.shape[0]
    return math.sqrt(6 / ((inputs + values.shape[0]) * field))

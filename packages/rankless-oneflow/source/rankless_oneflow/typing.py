"""`oneflow.typing`: the annotations of a job's arguments and of its result.

A job in the consistent view takes and returns whole arrays: `Numpy`. One in the mirrored view takes and returns lists
with one array for each device: `ListNumpy`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from rankless.errors import DataError

from .missing import getattr_of, refuse

__getattr__ = getattr_of("typing")


@dataclass(frozen=True)
class Placeholder:
    """What an argument of a job must be: an array, or a list of arrays, of this shape and dtype.

    Args:
        shape: The sizes of all dims, from 1 up. In the mirrored view they are those of one device.
        dtype: The dtype, such as `flow.int32`. Default: `flow.float`.

    Raises:
        ConfigError: The shape or the dtype is none.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        sizes = tuple(self.shape) if isinstance(self.shape, Sequence) else (self.shape,)
        if not all(isinstance(size, int | numpy.integer) and size > 0 for size in sizes):
            fix = "pass whole numbers from 1 up: int(BATCH_SIZE / GPU_NUM), not BATCH_SIZE / GPU_NUM"
            raise refuse("placeholders", f"shape {self.shape!r}", fix)
        if not isinstance(self.dtype, torch.dtype):
            raise refuse("placeholders", f"dtype={self.dtype!r}", "pass a dtype of OneFlow, such as flow.float")
        object.__setattr__(self, "shape", tuple(map(int, sizes)))

    def check(self, name: str, value: Any, where: str) -> None:
        """Raise `DataError` unless `value` is what a call may pass."""
        short = str(self.dtype).removeprefix("torch.")
        expected = f"{name} as a NumPy array of shape {list(self.shape)} and dtype {short}"
        if not isinstance(value, numpy.ndarray):
            fix = f"pass numpy.array({name})" if isinstance(value, Sequence) else "pass a NumPy array"
            raise DataError(expected=expected, found=f"a {type(value).__name__}", fix=fix, where=where)
        if value.shape != self.shape:
            fix = "pass an array of that shape, or change the placeholder; leave out a last, smaller batch"
            raise DataError(expected=expected, found=f"shape {list(value.shape)}", fix=fix, where=where)
        if value.dtype.name != short:
            fix = f'pass {name.partition("[")[0]}.astype("{short}")'
            raise DataError(expected=expected, found=f"dtype {value.dtype.name}", fix=fix, where=where)


class _ArrayPlaceholder(Placeholder):
    """The placeholder of an argument in the consistent view."""


class _ListPlaceholder(Placeholder):
    """The placeholder of an argument in the mirrored view."""

    def check(self, name: str, value: Any, where: str) -> None:
        """Raise `DataError` unless `value` is a list with an array for each device."""
        if not isinstance(value, list | tuple) or not value:
            expected = f"{name} as a list with one array for each device, in the mirrored view"
            fix = f"pass a list, as [{name}1, {name}2]; the consistent view takes the whole batch"
            found = "no array" if isinstance(value, list | tuple) else f"a {type(value).__name__}"
            raise DataError(expected=expected, found=found, fix=fix, where=where)
        for index, element in enumerate(value):
            super().check(f"{name}[{index}]", element, where)


class Numpy:
    """A whole array. `Numpy.Placeholder(shape, dtype)` annotates an argument, `Numpy` itself the result."""

    Placeholder = _ArrayPlaceholder


class ListNumpy:
    """A list with one array for each device: the counterpart of `Numpy` in the mirrored view."""

    Placeholder = _ListPlaceholder

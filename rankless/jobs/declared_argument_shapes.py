"""Typed placeholders: the annotation of a job's argument declares its shape and dtype, and every call is checked.

def train(images: Annotated[Tensor, Whole((100, 1, 28, 28), torch.float32)]): ...
"""

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from rankless.errors import ConfigError, DataError
from rankless.jobs.views.mirrored import LocalArgument


@dataclass(frozen=True)
class Whole:
    """Annotate an argument of a job that is one tensor or NumPy array, checked at each call.

    Args:
        shape: The sizes of all dims; None stands for any size.
        dtype: The dtype. Default: the job's `dtype`, else torch's default dtype at the call.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> @rankless.job(model=model)
        ... def predict(inputs: typing.Annotated[torch.Tensor, rankless.Whole((None, 3), torch.float32)]):
        ...     return model(inputs)
        >>> predict(torch.ones(4, 3)).shape
        torch.Size([4, 1])
        >>> predict(torch.ones(4, 2))
        Traceback (most recent call last):
        rankless.errors.DataError:
        expected: inputs of shape [any, 3]
        ...
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class PerDevice:
    """Annotate an argument of a job in the mirrored view: a list of one tensor or NumPy array per device.

    It implies `view="mirrored"`. An argument wrapped with `rankless.local` holds this device's element instead.

    Args:
        shape: The sizes of all dims of each element; None stands for any size.
        dtype: The dtype of each element. Default: as for `Whole`.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> @rankless.job(model=model)
        ... def predict(inputs: typing.Annotated[list, rankless.PerDevice((None, 3), torch.float32)]):
        ...     return model(inputs)
        >>> [result.shape for result in predict([torch.ones(4, 3)])]
        [torch.Size([4, 1])]
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype | None = None


Placeholder = Whole | PerDevice


def read_placeholders(function: Callable[..., Any], job: str, line: str) -> dict[str, Placeholder]:
    """Return the placeholders in a function's annotations by argument. Raises `ConfigError` for invalid ones."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError, AttributeError):
        # A text annotation names something that does not exist at run time. Use the annotations that are objects.
        hints = dict(getattr(function, "__annotations__", {}))
    found: dict[str, Placeholder] = {}
    for name, hint in hints.items():
        for extra in getattr(hint, "__metadata__", ()):
            if extra in (Whole, PerDevice):
                raise ConfigError(
                    expected=f"{extra.__name__} with a shape and a dtype, on argument {name!r} of job {job!r}",
                    found=f"{extra.__name__} without arguments",
                    fix=f"write {extra.__name__}((100, None), torch.float32); None stands for any size",
                    where=line,
                )
            if isinstance(extra, Whole | PerDevice):
                found[name] = extra
    return found


@dataclass(frozen=True)
class PlaceholderCheck:
    """Checks the arguments of one job."""

    function: Callable[..., Any]
    placeholders: Mapping[str, Placeholder]
    where: str
    dtype: torch.dtype | None = None
    """The dtype of placeholders without one; None for torch's default dtype at the call."""

    def __call__(self, args: Any, kwargs: Any, *, recast: bool) -> None:
        """Raise `DataError` for an argument that does not match its placeholder.

        With `recast` the run computes all floating-point numbers in a precision of its own, whatever the script
        says.
        """
        bound = inspect.signature(self.function).bind(*args, **kwargs)
        for name, placeholder in self.placeholders.items():
            if name in bound.arguments:
                dtype = placeholder.dtype or self.dtype or torch.get_default_dtype()
                one = TensorSpec(placeholder.shape, dtype, self.where, recast and dtype.is_floating_point)
                _check_argument(name, bound.arguments[name], placeholder, one)


@dataclass(frozen=True)
class TensorSpec:
    """What one tensor of an argument must be."""

    shape: tuple[int | None, ...]
    dtype: torch.dtype
    where: str
    any_precision: bool

    def __str__(self) -> str:
        """Return the text "float32 [100, any]"."""
        return f"{str(self.dtype).removeprefix('torch.')} {format_shape(self.shape)}"

    def has_dtype(self, dtype: torch.dtype) -> bool:
        """Whether a tensor of `dtype` matches."""
        return dtype == self.dtype or (self.any_precision and dtype.is_floating_point)


def _check_argument(name: str, value: Any, placeholder: Placeholder, one: TensorSpec) -> None:
    if isinstance(placeholder, Whole):
        _check_one(name, value, one)
    elif isinstance(value, LocalArgument):
        _check_one(f"{name}, this device's own,", value.value, one)
    elif isinstance(value, list):
        for index, element in enumerate(value):
            _check_one(f"{name}[{index}]", element, one)
    else:
        raise DataError(
            expected=f"{name} as a list with one element per device: {one}",
            found=describe_value(value),
            fix="pass a list, as [images1, images2], or rankless.local(x) for this device's own element",
            where=one.where,
        )


def _check_one(name: str, value: Any, one: TensorSpec) -> None:
    if not isinstance(value, Tensor | numpy.ndarray):
        raise DataError(
            expected=f"{name} as a tensor or a NumPy array: {one}",
            found=describe_value(value),
            fix="pass torch.tensor(…)",
            where=one.where,
        )
    shape, expected_shape = tuple(value.shape), one.shape
    fits = len(shape) == len(expected_shape) and all(
        size in (None, own) for size, own in zip(expected_shape, shape, strict=True)
    )
    if not fits:
        raise DataError(
            expected=f"{name} of shape {format_shape(expected_shape)}",
            found=f"shape {list(shape)}",
            fix="pass a batch of that shape, or change the placeholder: None stands for any size",
            where=one.where,
        )
    dtype = torch.from_numpy(value[:0] if value.ndim else value.reshape(1)).dtype if is_array(value) else value.dtype
    if not one.has_dtype(dtype):
        short = str(one.dtype).removeprefix("torch.")
        convert = f'{name.partition(",")[0]}.astype("{short}")' if is_array(value) else f"to({one.dtype})"
        raise DataError(
            expected=f"{name} of dtype {short}",
            found=str(dtype).removeprefix("torch."),
            fix=f"convert it before the call: {convert}",
            where=one.where,
        )


def is_array(value: Any) -> bool:
    """Whether a value is a NumPy array."""
    return isinstance(value, numpy.ndarray)


def format_shape(shape: tuple[int | None, ...]) -> str:
    """Return the text of a shape with sizes that may be any."""
    return "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"


def describe_value(value: Any) -> str:
    """Describe a value in a few words."""
    if isinstance(value, Tensor | numpy.ndarray):
        return f"a {type(value).__name__} of shape {list(value.shape)}"
    return f"a {type(value).__name__}"

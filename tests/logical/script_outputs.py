"""Compare what two runs of a script print and write: numbers to rounding, everything else exactly."""

import math
import pickle
import re
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

RELATIVE = 1e-9
ZERO = 1e-10
"""Smaller numbers may be rounding alone: Adam enlarges that of biases without a gradient, as of keys in attention."""
NUMBER = re.compile(r"[-+]?(?:\d+\.\d*|\.\d+|\d+(?=e))(?:e[-+]?\d+)?", re.IGNORECASE)
"""A number with a fraction. Integers are compared as text."""
TENSOR_FILES = {".pt", ".pth", ".tar", ".bin"}


class ClassOfScript:
    """Stands for a class of the script, whose module is gone when its file is read."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class LoadScriptObjects(pickle.Unpickler):
    """Reads objects of a script's own classes."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class by its name."""
        return ClassOfScript if module == "__main__" else super().find_class(module, name)


class ScriptPickle:
    """The module that `torch.load` takes as `pickle_module`."""

    Unpickler, load = LoadScriptObjects, pickle.load


def is_close(one: float, other: float, *, digits: int | None = None) -> bool:
    """Return whether two numbers are equal but for rounding.

    Args:
        one: A number.
        other: The other one.
        digits: How many digits after the point the script printed of both, if it rounded them.
    """
    if one == other or (math.isnan(one) and math.isnan(other)):
        return True
    printed = 0.0 if digits is None else 1.01 * 10.0**-digits
    return abs(one - other) <= max(RELATIVE * max(abs(one), abs(other)), printed, ZERO)


def compare_texts(expected: str, found: str) -> list[str]:
    """Return the lines of a text that differ."""
    lines, others = expected.splitlines(), found.splitlines()
    if len(lines) != len(others):
        return [f"{len(others)} lines instead of {len(lines)}: {others[-3:]} instead of {lines[-3:]}"]
    return [f"{other!r} instead of {line!r}" for line, other in zip(lines, others, strict=True) if differ(line, other)]


def differ(line: str, other: str) -> bool:
    """Return whether two lines differ by more than rounding."""
    if NUMBER.sub("#", line) != NUMBER.sub("#", other):
        return True
    pairs = zip(NUMBER.findall(line), NUMBER.findall(other), strict=True)
    return not all(is_close(float(one), float(two), digits=find_digits(one, two)) for one, two in pairs)


def find_digits(one: str, other: str) -> int | None:
    """Return how many digits after the point two numbers were rounded to; None if to few or to different ones."""
    digits, others = (len(number.partition(".")[2]) for number in (one, other))
    return digits if digits == others >= 8 and "e" not in f"{one}{other}".lower() else None


def compare_values(expected: Any, found: Any) -> list[str]:
    """Return where the contents of two files of tensors differ."""
    leaves, structure = pytree.tree_flatten(open_objects(expected))
    others, other_structure = pytree.tree_flatten(open_objects(found))
    if structure != other_structure:
        return [f"{other_structure} instead of {structure}"]
    return [
        f"leaf {n}: {b!r} instead of {a!r}"
        for n, (a, b) in enumerate(zip(leaves, others, strict=True))
        if differs(a, b)
    ]


def open_objects(value: Any) -> Any:
    """Return a value with dicts in place of modules and of objects of the script."""
    if isinstance(value, ClassOfScript | torch.nn.Module):
        return {"class": type(value).__name__, **{name: open_objects(item) for name, item in vars(value).items()}}
    if isinstance(value, dict):
        return {repr(name): open_objects(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [open_objects(item) for item in value]
    return value


def differs(one: Any, other: Any) -> bool:
    """Return whether two leaves differ by more than rounding."""
    if type(one) is not type(other):
        return True
    if isinstance(one, Tensor):
        if (one.shape, one.dtype, one.requires_grad) != (other.shape, other.dtype, other.requires_grad):
            return True
        return not torch.allclose(one, other, rtol=RELATIVE, atol=ZERO, equal_nan=True)
    if isinstance(one, numpy.ndarray):
        return one.dtype != other.dtype or differs(torch.from_numpy(one), torch.from_numpy(other))
    if isinstance(one, float):
        return not is_close(one, other)
    return bool(one != other) if type(one).__eq__ is not object.__eq__ else False


def compare_files(expected: Path, found: Path) -> list[str]:
    """Return where the files of two folders differ, by name and content."""
    names = sorted(path.relative_to(expected).as_posix() for path in expected.rglob("*") if path.is_file())
    others = sorted(path.relative_to(found).as_posix() for path in found.rglob("*") if path.is_file())
    if names != others:
        return [f"files {others} instead of {names}"]
    return [f"{name}: {line}" for name in names for line in compare_file(expected / name, found / name)]


def compare_file(expected: Path, found: Path) -> list[str]:
    """Return where two files differ."""
    if expected.suffix in TENSOR_FILES:
        return compare_values(load(expected), load(found))
    if expected.suffix == ".npy":
        return compare_values(numpy.load(expected), numpy.load(found))
    return compare_texts(expected.read_text(), found.read_text())


def load(path: Path) -> Any:
    """Return the contents of a file of tensors."""
    return torch.load(path, weights_only=False, pickle_module=ScriptPickle)

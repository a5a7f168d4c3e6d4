"""Plain values: compare a value with its snapshot without calling the user's code."""

import array
import math
import mmap
from collections import deque
from collections.abc import Iterable
from datetime import date, time, timedelta
from decimal import Decimal
from fractions import Fraction
from operator import is_
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

import numpy
import torch
from torch import Tensor

MISSING = object()
PLAIN_TYPES = (
    *(int, float, complex, bool, str, bytes, type(None), type(Ellipsis), range, slice),
    *(date, time, timedelta, Decimal, Fraction, PurePath),
    *(numpy.generic, numpy.dtype, torch.dtype, torch.device, torch.layout, torch.memory_format),
)
MAX_PLAIN_ITEMS = 64
"""Containers with at most this many plain values are plain values themselves: an equal one is equivalent."""

SEQUENCES: tuple[type[Any], ...] = (list, tuple, set, frozenset, deque)
CONTAINERS: tuple[type[Any], ...] = (*SEQUENCES, dict, MappingProxyType)
BUFFERS = (array.array, memoryview, mmap.mmap)
MAX_COMPARED_BYTES = 1 << 20
"""NumPy arrays up to this many bytes are compared at every call."""


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, text, None or similar, a small container of those, or a small NumPy array."""
    if isinstance(value, PLAIN_TYPES):
        return True
    kind = type(value)
    if kind in (list, tuple, set, frozenset, torch.Size):
        return len(value) <= MAX_PLAIN_ITEMS and all(map(is_plain, value))
    if kind is dict:
        return len(value) <= MAX_PLAIN_ITEMS and all(map(is_plain, value)) and all(map(is_plain, value.values()))
    if isinstance(value, numpy.ndarray):
        return value.dtype.kind != "O" and value.nbytes <= MAX_COMPARED_BYTES
    return kind is bytearray


def snapshot(value: Any) -> Any:
    """Return a plain value that cannot change in place: the value itself, or a copy of it."""
    kind = type(value)
    if kind in (list, set):
        return kind(map(snapshot, value))
    if kind is tuple:
        items = tuple(map(snapshot, value))
        return value if all(map(is_, items, value)) else items
    if kind is dict:
        return {key: snapshot(item) for key, item in value.items()}
    if isinstance(value, numpy.ndarray | bytearray):
        return value.copy()
    return value


def is_same(now: Any, value: Any) -> bool:
    """Return whether a value is the same object as, or an equal plain value to, a value returned by `snapshot`."""
    return now is value or (is_plain(value) and is_equal(now, value))


def is_equal(now: Any, value: Any) -> bool:
    """Return whether two plain values are equal to the last bit; 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    kind = type(value)
    if type(now) is not kind:
        return False
    if kind is float:
        alike = now == value and math.copysign(1.0, now) == math.copysign(1.0, value)
        return bool(alike or (now != now and value != value))
    if kind in (list, tuple, torch.Size):
        return len(now) == len(value) and all(map(is_equal, now, value))
    if kind in (set, frozenset):
        # The order of a copy may differ.
        return {(type(item), item) for item in now} == {(type(item), item) for item in value}
    if kind is dict:
        return (
            len(now) == len(value)
            and all(map(is_equal, now, value))
            and all(map(is_equal, now.values(), value.values()))
        )
    if isinstance(value, numpy.ndarray | numpy.generic):
        alike = (now.dtype, now.shape) == (value.dtype, value.shape)
        return alike and (now is value or now.tobytes() == value.tobytes())
    if kind in (complex, slice):
        return repr(now) == repr(value)
    return bool(now == value)


def list_elements(container: Any) -> tuple[Iterable[Any], Iterable[Any]]:
    """Return keys (none for a sequence) and values of a container, bypassing methods that a subclass overrides."""
    for kind in SEQUENCES:
        if isinstance(container, kind):
            return (), kind.__iter__(container)
    if isinstance(container, MappingProxyType):
        return container.keys(), container.values()
    return dict.__iter__(container), dict.values(container)


def format_briefly(value: Any) -> str:
    """Return a short text for a value; tensors of a capture have no numbers to show."""
    if value is MISSING:
        return "not there"
    if isinstance(value, Tensor):
        return "a tensor"
    if isinstance(value, CONTAINERS):
        return f"of length {len(value)}" if not is_plain(value) else f"{value!r:.40}"
    if isinstance(value, PLAIN_TYPES):
        return f"{value!r:.40}"
    return f"of type {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def make_type_keys(values: Iterable[Any]) -> tuple[str, ...]:
    """Return texts that distinguish plain values that compare equal: 1, 1.0 and True, 0.0 and -0.0."""
    return tuple(repr(value) if isinstance(value, float | complex) else type(value).__name__ for value in values)

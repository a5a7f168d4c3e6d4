"""Read the state of special objects (generators, files, caches) without changing it."""

import hashlib
import io
import sys
import threading
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import numpy
from torch import nn

from rankless.compiler.tracing.value_snapshots import MAX_COMPARED_BYTES
from rankless.errors import CaptureError
from rankless.user_code import is_user_code

NOT_RUN_IN_FORWARD = frozenset({"__init__", "__repr__", "__setstate__", "extra_repr", "reset_parameters"})
ROWS_PACKAGE = "rankless.extensions.servers."


def list_methods(kind: type) -> list[FunctionType]:
    """Return the methods of a module's class that may run in `forward`."""
    return [
        method
        for parent in kind.__mro__
        if parent not in (nn.Module, object)
        for name, method in vars(parent).items()
        if isinstance(method, FunctionType) and name not in NOT_RUN_IN_FORWARD
    ]


def get_namespace(value: Any) -> dict[str, Any] | None:
    """Return an object's `__dict__`, or None, without running code of its class."""
    try:
        # A threading.local has one namespace per thread.
        lookup = threading.local if isinstance(value, threading.local) else object
        namespace = lookup.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return namespace if isinstance(namespace, dict) else None


def return_value(value: Any) -> Any:
    """Return the value unchanged, for guards on objects without a name."""
    return value


def is_user_class(kind: type) -> bool:
    """Return whether a class is defined in the user's code."""
    if kind.__module__ == "__main__":
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return is_user_code(file)


def holds_rows(value: Any) -> bool:
    """Return whether a value has to do with tables of rows, which the operators of a program read when they run."""
    return type(value).__module__.startswith(ROWS_PACKAGE) and not isinstance(value, nn.Module)


def is_builtin_iterator(value: Any) -> bool:
    """Return whether a value is an iterator without a readable position: a generator, `itertools.count`, `zip`, …"""
    if not isinstance(value, Iterator):
        return False
    return not any(isinstance(vars(kind).get("__next__"), FunctionType) for kind in type(value).__mro__)


def hash_rng_state(generator: Any) -> str:
    """Return the state of a NumPy generator as a short digest."""
    has_bits = isinstance(generator, numpy.random.Generator)
    state = generator.bit_generator.state if has_bits else generator.get_state(legacy=False)
    with numpy.printoptions(threshold=sys.maxsize):
        return hashlib.sha256(repr(state).encode()).hexdigest()[:8]


def get_file_position(file: io.IOBase) -> int:
    """Return the position in a file; -1 if it has none."""
    return file.tell() if not file.closed and file.seekable() else -1


def get_cache_state(function: Any) -> tuple[int, int]:
    """Return how often a cached function has computed, and how many results it keeps."""
    info = function.cache_info()
    return info.misses, info.currsize


def make_size_error(label: str, found: str) -> CaptureError:
    """Return the error for a value that is too large to compare at every call."""
    return CaptureError(
        expected=f"plain values small enough to compare at every call: up to {MAX_COMPARED_BYTES} bytes of numbers",
        found=f"the job reads {label}: {found}",
        fix="make it a tensor, or extract what the job needs before the call",
    )

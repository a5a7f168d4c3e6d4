"""What objects of unusual kinds say about their state, without being changed by the question."""

import hashlib
import io
import sys
import threading
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import numpy
from torch import nn

from rankless.compiler.tracing.plain_values import MAX_COMPARED_BYTES
from rankless.errors import CaptureError
from rankless.user_code import is_user_code

NOT_RUN_IN_FORWARD = frozenset({"__init__", "__repr__", "__setstate__", "extra_repr", "reset_parameters"})


def list_methods(kind: type) -> list[FunctionType]:
    """The methods of a module's class that may run in `forward`."""
    return [
        method
        for parent in kind.__mro__
        if parent not in (nn.Module, object)
        for name, method in vars(parent).items()
        if isinstance(method, FunctionType) and name not in NOT_RUN_IN_FORWARD
    ]


def get_namespace(value: Any) -> dict[str, Any] | None:
    """An object's own namespace, if it has one; code of its class does not run."""
    try:
        # Each thread has its own namespace in a threading.local.
        lookup = threading.local if isinstance(value, threading.local) else object
        scope = lookup.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return scope if isinstance(scope, dict) else None


def return_value(value: Any) -> Any:
    """The value, for guards on what no name leads to."""
    return value


def is_user_class(kind: type) -> bool:
    """Whether a class stands in the user's code."""
    if kind.__module__ == "__main__":
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return is_user_code(file)


def is_builtin_iterator(value: Any) -> bool:
    """Whether a value is an iterator whose place cannot be seen: a generator, `itertools.count`, `zip`, …"""
    if not isinstance(value, Iterator):
        return False
    return not any(isinstance(vars(kind).get("__next__"), FunctionType) for kind in type(value).__mro__)


def hash_rng_state(generator: Any) -> str:
    """Where a NumPy generator stands, as text."""
    has_bits = isinstance(generator, numpy.random.Generator)
    state = generator.bit_generator.state if has_bits else generator.get_state(legacy=False)
    with numpy.printoptions(threshold=sys.maxsize):
        return hashlib.sha256(repr(state).encode()).hexdigest()[:8]


def get_file_position(file: io.IOBase) -> int:
    """How far a file has been read or written; -1 where that cannot be said."""
    return file.tell() if not file.closed and file.seekable() else -1


def get_cache_state(function: Any) -> tuple[int, int]:
    """How often a cached function has computed, and how many answers it keeps."""
    info = function.cache_info()
    return info.misses, info.currsize


def make_size_error(label: str, found: str) -> CaptureError:
    """The error for a value that is too large to be compared at every call."""
    return CaptureError(
        expected=f"plain values that can be compared at every call: up to {MAX_COMPARED_BYTES} bytes of numbers",
        found=f"the job reads {label}: {found}",
        fix="make it a tensor, or take what the job needs out of it before the call",
    )

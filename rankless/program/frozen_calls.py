"""Calls whose answer a captured program would freeze: Python's and NumPy's random numbers, and the time."""

import contextlib
import functools
import random
import sys
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy

from rankless.errors import CaptureError
from rankless.program.tracing import is_users_file, user_line

CLOCKS = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time")


@contextlib.contextmanager
def frozen_calls_refused() -> Iterator[None]:
    """Within, the user's calls of `random`, `numpy.random` and clocks raise `CaptureError` with their line."""
    originals: list[tuple[ModuleType, str, Any]] = []
    for module, names in ((random, drawing(random)), (numpy.random, drawing(numpy.random)), (time, CLOCKS)):
        originals += [(module, name, getattr(module, name)) for name in names]
    for module, name, original in originals:
        setattr(module, name, refusing(original, f"{module.__name__}.{name}"))
    # What has been imported by name is not seen above; its mark on the generators is.
    python_state, numpy_state = random.getstate(), numpy_digest()
    try:
        yield
    finally:
        for module, name, original in originals:
            setattr(module, name, original)
    if random.getstate() != python_state or numpy_digest() != numpy_state:
        raise refusal("random numbers of Python or NumPy", None)


def drawing(module: ModuleType) -> list[str]:
    """The functions of a module that draw from its hidden generator: methods bound to it."""
    generator = module.random.__self__
    return [name for name, item in vars(module).items() if getattr(item, "__self__", None) is generator]


def refusing(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function, but an error if the user's code calls it."""

    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        if is_users_file(frame.f_code.co_filename):
            raise refusal(name, user_line(frame))
        return original(*args, **kwargs)

    return called


def refusal(what: str, where: str | None) -> CaptureError:
    """The error for an answer that would be the same at every step."""
    return CaptureError(
        expected="randomness from torch, and nothing that changes by itself, inside a job",
        found=f"the job asks for {what}; its Python runs once, so the answer would be the same at every step",
        fix="use torch.rand and its kind inside the job, or ask outside and pass the answer as an argument",
        where=where,
    )


def numpy_digest() -> tuple[object, ...]:
    """The state of NumPy's hidden generator."""
    name, keys, *rest = numpy.random.get_state(legacy=True)
    return name, numpy.asarray(keys).tobytes(), *rest

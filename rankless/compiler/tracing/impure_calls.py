"""Calls whose answer a captured program would freeze: random numbers of Python and NumPy, clocks, files, input."""

import contextlib
import datetime
import functools
import io
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy
import torch

from rankless.errors import CaptureError
from rankless.user_code import INSTALLED_FOLDERS, STANDARD_FOLDER, is_user_code, script_line, user_line

CHANGING = "randomness from torch, and nothing that changes by itself, inside a job"
OUTSIDE = "randomness from torch, and no files or input, inside a job"
CLOCKS = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time")
FILES = ("open", "read", "write", "stat", "listdir", "scandir", "system")
FROZEN: dict[Any, str] = {
    **{getattr(time, name): CHANGING for name in (*CLOCKS, "localtime", "gmtime", "thread_time", "strftime", "ctime")},
    **{getattr(os, name): CHANGING for name in ("urandom", "getrandom", "getcwd", "getpid") if hasattr(os, name)},
    **dict.fromkeys((open, input, *(getattr(os, name) for name in FILES)), OUTSIDE),
}
"""Functions written in C that the user's code may not call, however it has come by them."""

FROZEN_NAMES = frozenset(function.__name__ for function in FROZEN) | {"random", "getrandbits", "seed", "setstate"}
FROZEN_NAMES |= {"now", "utcnow", "today", "fork_exec"}

QUIET_MODULES = ("logging", "warnings.py", "linecache.py", "tokenize.py", "inspect.py", "importlib", "traceback.py")
QUIET = ("<frozen importlib", *(STANDARD_FOLDER + name for name in QUIET_MODULES))
"""Parts of Python that ask for the time or read source files without giving the answer to their caller."""


def require_not_frozen(function: Any, frame: FrameType) -> None:
    """Raise `CaptureError` if a function is frozen and the user's code calls it, itself or by Python's library."""
    name = getattr(function, "__name__", "")
    if name not in FROZEN_NAMES:
        return
    owner = getattr(function, "__self__", None)
    expected = FROZEN.get(function)
    if isinstance(owner, random.Random) or name in ("now", "utcnow", "today"):
        is_clock = isinstance(owner, type) and issubclass(owner, datetime.date)
        expected = CHANGING if is_clock or isinstance(owner, random.Random) else None
    elif name == "fork_exec":
        expected = OUTSIDE
    if expected is None:
        return
    asking = user_asking(frame)
    if asking is not None:
        raise refusal(called_as(function, owner, frame), script_line(asking) or user_line(asking), expected)


def require_nothing_written(function: Any, frame: FrameType) -> None:
    """Raise `CaptureError` if the user's code writes to a file, which would happen at capture only."""
    name = getattr(function, "__name__", "")
    if name not in ("write", "writelines", "writerow", "writerows"):
        return
    owner = getattr(function, "__self__", None)
    if not isinstance(owner, io.IOBase) and type(owner).__module__ != "_csv":
        return
    asking = user_asking(frame)
    if asking is not None:
        raise CaptureError(
            expected="a job that writes nothing: its Python runs once, not at every step",
            found=f"{name}() of a file inside the job",
            fix="return what is to be written, and write it after the job",
            where=script_line(asking) or user_line(asking),
        )


def user_asking(frame: FrameType | None) -> FrameType | None:
    """The user's frame for which Python's library works here; None if that is PyTorch's, or only keeps a log."""
    while frame is not None:
        file = frame.f_code.co_filename
        if is_user_code(file):
            return frame
        if not file.startswith((STANDARD_FOLDER, "<frozen ")) or file.startswith((*INSTALLED_FOLDERS, *QUIET)):
            return None
        frame = frame.f_back
    return None


def called_as(function: Any, owner: Any, frame: FrameType) -> str:
    """What the user's code has called: a function of Python's library, or the frozen one itself."""
    called = None
    while frame.f_back is not None and not is_user_code(frame.f_code.co_filename):
        called, frame = frame, frame.f_back
    if called is not None:
        return f"{called.f_globals.get('__name__')}.{called.f_code.co_name}"
    if isinstance(owner, type):
        return f"{owner.__module__}.{owner.__qualname__}.{function.__name__}"
    return f"{function.__module__ or type(owner).__module__}.{function.__name__}"


@contextlib.contextmanager
def frozen_calls_refused() -> Iterator[None]:
    """Within, the user's calls of `numpy.random` and `torch.load` raise `CaptureError` with their line.

    They are not written in C as the profile of `watching` sees it, which finds the others.
    """
    asked = [(numpy.random, name, CHANGING) for name in drawing_of_numpy()]
    asked += [(torch, name, OUTSIDE) for name in ("load", "save")] + [(torch, "initial_seed", CHANGING)]
    originals = [(module, name, getattr(module, name)) for module, name, _ in asked]
    for module, name, expected in asked:
        setattr(module, name, refusing(getattr(module, name), f"{module.__name__}.{name}", expected))
    # What has been imported by name is not seen above; its mark on the generators is.
    python_state, numpy_state = random.getstate(), numpy_digest()
    try:
        yield
    finally:
        for module, name, original in originals:
            setattr(module, name, original)
    if random.getstate() != python_state or numpy_digest() != numpy_state:
        raise refusal("random numbers of Python or NumPy", None, CHANGING)


def drawing_of_numpy() -> list[str]:
    """The functions of NumPy that draw from its hidden generator: methods bound to it."""
    generator = vars(numpy.random)["random"].__self__
    return [name for name, item in vars(numpy.random).items() if getattr(item, "__self__", None) is generator]


def refusing(original: Callable[..., Any], name: str, expected: str) -> Callable[..., Any]:
    """The function, but an error if the user's code calls it."""

    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        if is_user_code(frame.f_code.co_filename):
            raise refusal(name, script_line(frame) or user_line(frame), expected)
        return original(*args, **kwargs)

    return called


def refusal(what: str, where: str | None, expected: str) -> CaptureError:
    """The error for an answer that would be the same at every step."""
    return CaptureError(
        expected=expected,
        found=f"the job asks for {what}; its Python runs once, so the answer would be the same at every step",
        fix="use torch.rand and its kind inside the job, or ask outside and pass the answer as an argument",
        where=where,
    )


def numpy_digest() -> tuple[object, ...]:
    """The state of NumPy's hidden generator."""
    name, keys, *rest = numpy.random.get_state(legacy=True)
    return name, numpy.asarray(keys).tobytes(), *rest

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

EXPECTED_DETERMINISTIC = "randomness from torch, and nothing that changes by itself, inside a job"
EXPECTED_NO_IO = "randomness from torch, and no files or input, inside a job"
CLOCK_NAMES = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time")
FILE_NAMES = ("open", "read", "write", "stat", "listdir", "scandir", "system")
IMPURE_FUNCTIONS: dict[Any, str] = {
    **{
        getattr(time, name): EXPECTED_DETERMINISTIC
        for name in (*CLOCK_NAMES, "localtime", "gmtime", "thread_time", "strftime", "ctime")
    },
    **{
        getattr(os, name): EXPECTED_DETERMINISTIC
        for name in ("urandom", "getrandom", "getcwd", "getpid")
        if hasattr(os, name)
    },
    **dict.fromkeys((open, input, *(getattr(os, name) for name in FILE_NAMES)), EXPECTED_NO_IO),
}
"""Functions written in C that the user's code may not call, however it has come by them."""

IMPURE_NAMES = frozenset(function.__name__ for function in IMPURE_FUNCTIONS) | {
    "random",
    "getrandbits",
    "seed",
    "setstate",
}
IMPURE_NAMES |= {"now", "utcnow", "today", "fork_exec"}

IGNORED_MODULES = ("logging", "warnings.py", "linecache.py", "tokenize.py", "inspect.py", "importlib", "traceback.py")
IGNORED_FILES = ("<frozen importlib", *(STANDARD_FOLDER + name for name in IGNORED_MODULES))
"""Parts of Python that ask for the time or read source files without giving the answer to their caller."""


def refuse_impure_call(function: Any, frame: FrameType) -> None:
    """Raise `CaptureError` if a function is frozen and the user's code calls it, itself or by Python's library."""
    name = getattr(function, "__name__", "")
    if name not in IMPURE_NAMES:
        return
    owner = getattr(function, "__self__", None)
    expected = IMPURE_FUNCTIONS.get(function)
    if isinstance(owner, random.Random) or name in ("now", "utcnow", "today"):
        is_clock = isinstance(owner, type) and issubclass(owner, datetime.date)
        expected = EXPECTED_DETERMINISTIC if is_clock or isinstance(owner, random.Random) else None
    elif name == "fork_exec":
        expected = EXPECTED_NO_IO
    if expected is None:
        return
    asking = find_user_frame(frame)
    if asking is not None:
        raise make_impure_call_error(
            format_callee(function, owner, frame), script_line(asking) or user_line(asking), expected
        )


def refuse_file_write(function: Any, frame: FrameType) -> None:
    """Raise `CaptureError` if the user's code writes to a file, which would happen at capture only."""
    name = getattr(function, "__name__", "")
    if name not in ("write", "writelines", "writerow", "writerows"):
        return
    owner = getattr(function, "__self__", None)
    if not isinstance(owner, io.IOBase) and type(owner).__module__ != "_csv":
        return
    asking = find_user_frame(frame)
    if asking is not None:
        raise CaptureError(
            expected="a job that writes nothing: its Python runs once, not at every step",
            found=f"{name}() of a file inside the job",
            fix="return what is to be written, and write it after the job",
            where=script_line(asking) or user_line(asking),
        )


def find_user_frame(frame: FrameType | None) -> FrameType | None:
    """The user's frame for which Python's library works here; None if that is PyTorch's, or only keeps a log."""
    while frame is not None:
        file = frame.f_code.co_filename
        if is_user_code(file):
            return frame
        if not file.startswith((STANDARD_FOLDER, "<frozen ")) or file.startswith((*INSTALLED_FOLDERS, *IGNORED_FILES)):
            return None
        frame = frame.f_back
    return None


def format_callee(function: Any, owner: Any, frame: FrameType) -> str:
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
def refuse_python_impure_calls() -> Iterator[None]:
    """Within, the user's calls of `numpy.random` and `torch.load` raise `CaptureError` with their line.

    They are not written in C as the profile of `watching` sees it, which finds the others.
    """
    asked = [(numpy.random, name, EXPECTED_DETERMINISTIC) for name in list_numpy_random_functions()]
    asked += [(torch, name, EXPECTED_NO_IO) for name in ("load", "save")] + [
        (torch, "initial_seed", EXPECTED_DETERMINISTIC)
    ]
    originals = [(module, name, getattr(module, name)) for module, name, _ in asked]
    for module, name, expected in asked:
        setattr(module, name, make_refusing_function(getattr(module, name), f"{module.__name__}.{name}", expected))
    # What has been imported by name is not seen above; its mark on the generators is.
    python_state, numpy_state = random.getstate(), get_numpy_rng_state()
    try:
        yield
    finally:
        for module, name, original in originals:
            setattr(module, name, original)
    if random.getstate() != python_state or get_numpy_rng_state() != numpy_state:
        raise make_impure_call_error("random numbers of Python or NumPy", None, EXPECTED_DETERMINISTIC)


def list_numpy_random_functions() -> list[str]:
    """The functions of NumPy that draw from its hidden generator: methods bound to it."""
    generator = vars(numpy.random)["random"].__self__
    return [name for name, item in vars(numpy.random).items() if getattr(item, "__self__", None) is generator]


def make_refusing_function(original: Callable[..., Any], name: str, expected: str) -> Callable[..., Any]:
    """The function, but an error if the user's code calls it."""

    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        if is_user_code(frame.f_code.co_filename):
            raise make_impure_call_error(name, script_line(frame) or user_line(frame), expected)
        return original(*args, **kwargs)

    return called


def make_impure_call_error(what: str, where: str | None, expected: str) -> CaptureError:
    """The error for an answer that would be the same at every step."""
    return CaptureError(
        expected=expected,
        found=f"the job asks for {what}; its Python runs once, so the answer would be the same at every step",
        fix="use torch.rand and its kind inside the job, or ask outside and pass the answer as an argument",
        where=where,
    )


def get_numpy_rng_state() -> tuple[object, ...]:
    """The state of NumPy's hidden generator."""
    name, keys, *rest = numpy.random.get_state(legacy=True)
    return name, numpy.asarray(keys).tobytes(), *rest

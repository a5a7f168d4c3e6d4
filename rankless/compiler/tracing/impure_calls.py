"""Refuse impure calls, whose result a captured program would freeze: clocks, files, input, Python and NumPy random."""

import contextlib
import datetime
import io
import os
import random
import time
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

import numpy
import torch

from rankless.compiler.tracing.replaced_attributes import make_refusing_function, replace_attributes
from rankless.errors import CaptureError
from rankless.user_code import INSTALLED_FOLDERS, STANDARD_FOLDER, is_user_code, script_line, user_line

EXPECTED_DETERMINISTIC = "a job that draws random numbers from torch only and reads no clock or process state"
EXPECTED_NO_IO = "a job that draws random numbers from torch only and uses no files or input"
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
"""Functions written in C that the user's code may not call, under whatever name it imports them."""

IMPURE_NAMES = frozenset(function.__name__ for function in IMPURE_FUNCTIONS) | {
    "random",
    "getrandbits",
    "seed",
    "setstate",
}
GENERATOR_METHODS = {"get_state", "set_state", "manual_seed", "initial_seed"}
"""Methods of torch's generators that a program would not repeat; "seed" is among `IMPURE_NAMES`."""
IMPURE_NAMES |= {"now", "utcnow", "today", "fork_exec"} | GENERATOR_METHODS

GENERATOR_FILES = (
    os.path.join(os.sep, "torch", "random.py"),
    os.path.join(os.sep, "tracing", "script_generators.py"),
    os.path.join(os.sep, "torch", "cuda", "random.py"),
    STANDARD_FOLDER + "contextlib.py",
)
"""Files of functions that read or set the state of generators for their callers."""

IGNORED_MODULES = ("logging", "warnings.py", "linecache.py", "tokenize.py", "inspect.py", "importlib", "traceback.py")
IGNORED_FILES = ("<frozen importlib", *(STANDARD_FOLDER + name for name in IGNORED_MODULES))
"""Parts of Python's library that read the time or source files without returning the result to their caller."""


def refuse_impure_call(function: Any, frame: FrameType) -> None:
    """Raise `CaptureError` if the user's code calls an impure function, directly or through Python's library."""
    name = getattr(function, "__name__", "")
    if name not in IMPURE_NAMES:
        return
    owner = getattr(function, "__self__", None)
    if isinstance(owner, torch.Generator):
        refuse_generator_call(frame)
        return
    expected = IMPURE_FUNCTIONS.get(function)
    if isinstance(owner, random.Random) or name in ("now", "utcnow", "today"):
        is_clock = isinstance(owner, type) and issubclass(owner, datetime.date)
        expected = EXPECTED_DETERMINISTIC if is_clock or isinstance(owner, random.Random) else None
    elif name == "fork_exec":
        expected = EXPECTED_NO_IO
    if expected is None:
        return
    user_frame = find_user_frame(frame)
    if user_frame is not None:
        raise make_impure_call_error(
            format_callee(function, owner, frame), script_line(user_frame) or user_line(user_frame), expected
        )


def refuse_generator_call(frame: FrameType) -> None:
    """Raise `CaptureError` if the user's code reads or sets the state of a generator, except by a traced fork.

    `torch.utils.checkpoint` may: it draws the same numbers again, and the program does too.
    """
    caller: FrameType | None = frame
    while caller is not None and caller.f_code.co_filename.endswith(GENERATOR_FILES):
        caller = caller.f_back
    if caller is not None and is_user_code(caller.f_code.co_filename):
        raise CaptureError(
            expected="a job whose random operators alone use torch's generator",
            found="the job reads or sets the state of a generator",
            fix="seed or restore it outside the job, around its call, or on CPUs within torch.random.fork_rng",
            where=script_line(caller) or user_line(caller),
        )


def refuse_file_write(function: Any, frame: FrameType) -> None:
    """Raise `CaptureError` if the user's code writes to a file, which would happen during capture only."""
    name = getattr(function, "__name__", "")
    if name not in ("write", "writelines", "writerow", "writerows"):
        return
    owner = getattr(function, "__self__", None)
    if not isinstance(owner, io.IOBase) and type(owner).__module__ != "_csv":
        return
    user_frame = find_user_frame(frame)
    if user_frame is not None:
        raise CaptureError(
            expected="a job that writes no files: its Python runs once, not at every step",
            found=f"{name}() of a file inside the job",
            fix="return the value from the job and write it afterwards",
            where=script_line(user_frame) or user_line(user_frame),
        )


def find_user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the user's frame on whose behalf Python's library runs; None if PyTorch or logging called the library."""
    while frame is not None:
        file = frame.f_code.co_filename
        if is_user_code(file):
            return frame
        if not file.startswith((STANDARD_FOLDER, "<frozen ")) or file.startswith((*INSTALLED_FOLDERS, *IGNORED_FILES)):
            return None
        frame = frame.f_back
    return None


def format_callee(function: Any, owner: Any, frame: FrameType) -> str:
    """Return the name of what the user's code called: a function of Python's library, or the impure one itself."""
    library_frame = None
    while frame.f_back is not None and not is_user_code(frame.f_code.co_filename):
        library_frame, frame = frame, frame.f_back
    if library_frame is not None:
        return f"{library_frame.f_globals.get('__name__')}.{library_frame.f_code.co_name}"
    if isinstance(owner, type):
        return f"{owner.__module__}.{owner.__qualname__}.{function.__name__}"
    return f"{function.__module__ or type(owner).__module__}.{function.__name__}"


@contextlib.contextmanager
def refuse_python_impure_calls() -> Iterator[None]:
    """Within the context, the user's calls of `numpy.random` and `torch.load` raise `CaptureError` with their line.

    The profiler of `PythonTracer` does not see these functions as C functions; it catches the others.
    """
    # These are methods that are bound to NumPy's global generator.
    generator = vars(numpy.random)["random"].__self__
    drawing = [name for name, item in vars(numpy.random).items() if getattr(item, "__self__", None) is generator]
    refused = [(numpy.random, name, EXPECTED_DETERMINISTIC) for name in drawing]
    refused += [(torch, "load", EXPECTED_NO_IO), (torch, "save", EXPECTED_NO_IO)]
    refused += [(torch, "initial_seed", EXPECTED_DETERMINISTIC)]
    # The patches miss functions that the script imported by name. Their effect on the generators shows.
    python_state, numpy_state = random.getstate(), get_numpy_rng_state()
    with replace_attributes(*(make_refusal(module, name, expected) for module, name, expected in refused)):
        yield
    if random.getstate() != python_state or get_numpy_rng_state() != numpy_state:
        raise make_impure_call_error("a random function of Python or NumPy", None, EXPECTED_DETERMINISTIC)


def make_refusal(module: ModuleType, name: str, expected: str) -> tuple[ModuleType, str, Callable[..., Any]]:
    """Return a function of a module, by its name, and what raises in its place when the user's code calls it."""

    def make_error(frame: FrameType) -> CaptureError:
        return make_impure_call_error(f"{module.__name__}.{name}", script_line(frame) or user_line(frame), expected)

    return module, name, make_refusing_function(getattr(module, name), is_user_code, make_error)


def make_impure_call_error(function_name: str, where: str | None, expected: str) -> CaptureError:
    """Return the error for a call whose result would be the same at every step."""
    return CaptureError(
        expected=expected,
        found=f"the job calls {function_name}; its Python runs once, so the result would be the same at every step",
        fix="use torch.rand and its variants inside the job, or call it outside and pass the result as an argument",
        where=where,
    )


def get_numpy_rng_state() -> tuple[object, ...]:
    """Return the state of NumPy's global generator."""
    name, keys, *rest = numpy.random.get_state(legacy=True)
    return name, numpy.asarray(keys).tobytes(), *rest

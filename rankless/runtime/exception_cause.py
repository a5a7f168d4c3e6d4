"""Finds the cause of a failure in the user's words, and the line of the user's script.

The exception that reaches the top of a script may only wrap the cause: PyTorch raises the errors of a DataLoader's
workers, of replicas and of processes again, with the first traceback in the message. A pool of processes appends it as
`__cause__`, a group holds several exceptions, and a compiler raises an error of its own from the script's.
"""

import contextlib
import re
from types import TracebackType
from typing import NamedTuple

from rankless.config.available_cpu_and_memory import describe_shared_memory
from rankless.errors import RanklessError
from rankless.user_code import is_library

_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'^ +File "(.*)", line (\d+)', re.MULTILINE)
_WHERE = re.compile(r"^Caught \w+ (in .*?)\.?$", re.MULTILINE)
_REMOTE = ("RemoteTraceback", "_RemoteTraceback")
_EXHAUSTED = re.compile(
    r"unable to (?:write to|allocate shared memory\S* for|open shared memory object|resize|mmap).*?/?torch_"
    r"|killed by signal: Bus error|out of shared memory|insufficient shared memory"
)
"""The errors of PyTorch's shared memory and of its DataLoader when /dev/shm is full."""
_LOST_READER = re.compile(r"DataLoader worker \(pid\(s\) [\d, ]+\) exited unexpectedly")
"""PyTorch's error from another one, which says by which signal."""
MAX_CAUSE_CHARACTERS = 200


class ErrorCause(NamedTuple):
    """What a report says first about an exception."""

    text: str
    """The exception's type and the first line of its message."""
    line: str
    """The innermost line of the script, like "/home/me/train.py:33"; "" if the script has none."""


def find_cause(error: BaseException) -> ErrorCause:
    """Return the cause of an exception that has reached the top of a script, and the script's line."""
    cause, more = _unwrap(error)
    message = read_message(cause)
    text = _read_remote(message) or _first_line(type(cause).__name__, message)
    if _EXHAUSTED.search(message) and (size := describe_shared_memory()):
        more += f"; {size}: give it more, as root with mount -o remount,size=8G or for a container with --shm-size=8g"
    return ErrorCause(text + more, _find_line(cause) or _find_line(error))


def read_message(error: BaseException | None) -> str:
    """Return the text of an exception, also if its class, which may be the script's, cannot make it."""
    with contextlib.suppress(Exception):  # the failure of the method must not hide the error
        return str(error)
    return "<its text cannot be made>"


def _unwrap(error: BaseException) -> tuple[BaseException, str]:
    """Return the exception that says most about the cause, and what to add to its text."""
    more = ""
    while True:
        parts = getattr(error, "exceptions", None)  # of an ExceptionGroup, which Python has since 3.11
        if isinstance(parts, tuple) and parts and isinstance(parts[0], BaseException):
            more = more or f" (the first of {len(parts)} errors of {type(error).__name__}: {error.args[0]})"
            error = parts[0]
            continue
        cause = error.__cause__
        if cause is None or type(cause).__name__ in _REMOTE or isinstance(error, RanklessError):
            return error, more
        if _LOST_READER.search(read_message(error)):
            error = cause
            continue
        if not _is_raised_in_library(error) or _is_raised_in_library(cause):
            return error, more
        more = more or f" ({type(error).__name__})"
        error = cause


def _is_raised_in_library(error: BaseException) -> bool:
    files = [file for file, _ in _list_frames(error.__traceback__)]
    return not files or is_library(files[-1])


def _read_remote(message: str) -> str:
    """Return the last exception of a traceback that a message contains, and where it was raised; "" without one."""
    if _TRACEBACK not in message:
        return ""
    frames = list(_FRAME.finditer(message))
    after = message[frames[-1].end() if frames else message.index(_TRACEBACK) + len(_TRACEBACK) :].splitlines()[1:]
    text = next((line.strip() for line in after if line and not line.startswith(" ")), "")
    where = _WHERE.search(message)
    return text[:MAX_CAUSE_CHARACTERS] + (f" ({where[1]})" if where else "") if text else ""


def _first_line(name: str, message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    line = " ".join(lines[:2] if lines and lines[0].endswith(":") else lines[:1])  # "backend='x' raised:", the cause
    return f"{name}: {line[:MAX_CAUSE_CHARACTERS]}" if line else name


def _find_line(error: BaseException) -> str:
    """Return the innermost line of the script: in the process that raised first, where another one has raised again."""
    if isinstance(error, SyntaxError) and error.filename and not is_library(error.filename):
        return f"{error.filename}:{error.lineno}"
    texts = [read_message(error)]
    if type(error.__cause__).__name__ in _REMOTE:
        texts.append(read_message(error.__cause__))
    frames = [(file, int(line)) for text in texts for file, line in _FRAME.findall(text)]
    for candidates in (frames, _list_frames(error.__traceback__)):
        for file, line in reversed(candidates):
            if not file.startswith("<") and not is_library(file):
                return f"{file}:{line}"
    return ""


def _list_frames(traceback: TracebackType | None) -> list[tuple[str, int]]:
    """Return file and line of each frame of a traceback, the innermost last."""
    frames = []
    while traceback is not None:
        frames.append((traceback.tb_frame.f_code.co_filename, traceback.tb_lineno))
        traceback = traceback.tb_next
    return frames

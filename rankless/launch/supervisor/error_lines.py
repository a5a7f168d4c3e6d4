"""What a report says about an exception in one line: the cause in the user's words, and the line of the script."""

import re

from rankless.launch.watchdog.stack_classifier import find_script_folder, format_line, shorten_path
from rankless.launch.watchdog.stacks import Frame
from rankless.records.events import GroupTeardown, Raised
from rankless.user_code import is_library

_FRAME = re.compile(r'^ *File "(.*)", line (\d+), in (.*)$', re.MULTILINE)
_IN_CALLBACK = "Got the following error when running the callback: "
"""How PyTorch's futures begin an error's text, such as that of a collective in DistributedDataParallel's backward."""


def first_line(record: Raised | GroupTeardown) -> str:
    """Return the type of the exception that is the cause, and the first line of its message."""
    _, found, inner = record.message.rpartition(_IN_CALLBACK)
    if found:
        kind, _, message = inner.partition(":")
        return _join(kind, message)
    if record.cause:
        return record.cause
    return _join(record.error_type, record.message)


def _join(kind: str, message: str) -> str:
    line = (message.strip().splitlines() or [""])[0]
    return f"{kind}: {line[:200]}" if line else kind


def find_line(record: Raised | GroupTeardown) -> str:
    """Return the innermost line of the script, like "train.py:33", or "" if there is none."""
    if not record.line:
        return find_script_line(record.traceback)
    file, _, number = record.line.rpartition(":")
    return f"{shorten_path(file)}:{number}"


def find_script_line(traceback: str) -> str:
    """Return the innermost line of the script in a traceback, like "train.py:33", or "" if there is none."""
    frames = [Frame(file, int(line), function) for file, line, function in _FRAME.findall(traceback)]
    own = [frame for frame in frames if not is_library(frame.file)]
    return format_line(own[-1], find_script_folder(own)) if own else ""


def shorten_traceback(traceback: str, *, limit: int) -> list[str]:
    """Return the last lines of a traceback, after those of the script's innermost frame if that is further out.

    Args:
        traceback: The text of the traceback.
        limit: How many lines to return at most, without the lines that say "...".
    """
    lines = traceback.rstrip().splitlines()
    if len(lines) <= limit:
        return lines
    frames = [number for number, line in enumerate(lines) if _is_script_frame(line)]
    if not frames or frames[-1] >= len(lines) - limit:
        return ["...", *lines[-limit:]]
    start = frames[-1]
    end = next((number for number in range(start + 1, len(lines)) if not lines[number].startswith("    ")), start + 1)
    script = lines[start : min(end, start + 3)]
    return ["...", *script, "  ...", *lines[len(script) - limit :]]


def _is_script_frame(line: str) -> bool:
    found = _FRAME.match(line)
    return found is not None and not found[1].startswith("<") and not is_library(found[1])

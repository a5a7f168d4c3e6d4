"""A worker's output: a log file of its own. A full disk costs lines, never the training."""

import errno
import io
import os
import sys
from collections.abc import Callable
from typing import Any

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class LogFile(io.FileIO):
    """A file that drops what does not fit, and calls `on_loss` the first time."""

    def __init__(self, descriptor: int, *, name: str, on_loss: Callable[[str], None]) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.name = name
        self._on_loss: Callable[[str], None] | None = on_loss

    def write(self, data: Any, /) -> int:
        """Write all of `data`, or claim to have."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            if self._on_loss is not None:
                tell, self._on_loss = self._on_loss, None
                tell(error.strerror or "the disk is full")
            return memoryview(data).nbytes


def redirect_output(log_file: str, *, on_loss: Callable[[str], None]) -> None:
    """Send all output of this process, its C code and its children to `log_file`, and give it no input."""
    try:
        log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        log = os.open(os.devnull, os.O_WRONLY)
        on_loss(error.strerror or "the log file cannot be made")
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
        os.set_inheritable(target, True)
    os.close(log)
    os.close(nothing)
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.FileIO(0, closefd=False))  # type: ignore[misc]  # as the interpreter itself does at start
    sys.stdout = sys.__stdout__ = _text(1, name="<stdout>", on_loss=on_loss)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _text(2, name="<stderr>", on_loss=on_loss)  # type: ignore[misc]


def _text(descriptor: int, *, name: str, on_loss: Callable[[str], None]) -> io.TextIOWrapper:
    old = sys.__stdout__ if descriptor == 1 else sys.__stderr__
    encoding = old.encoding if old is not None else "utf-8"
    errors = "backslashreplace" if descriptor == 2 else (old.errors if old is not None else None)
    binary = io.BufferedWriter(LogFile(descriptor, name=name, on_loss=on_loss))
    # Line by line, as on a terminal: the agent shows it while it happens.
    return io.TextIOWrapper(binary, encoding=encoding, errors=errors, line_buffering=True)

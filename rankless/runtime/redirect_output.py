"""Sends a worker's output to a log file of its own. A full disk loses lines, but the training continues."""

import errno
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rankless.records.private_files import FILE_MODE

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class LossyLogFile(io.FileIO):
    """A file that drops what does not fit, and calls `on_loss` the first time."""

    def __init__(self, descriptor: int, *, name: str, on_loss: Callable[[str], None]) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.name = name
        self._on_loss: Callable[[str], None] | None = on_loss

    def write(self, data: Any, /) -> int:
        """Write `data`, or drop it if the disk is full. Returns the number of its bytes in both cases."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            if self._on_loss is not None:
                report, self._on_loss = self._on_loss, None
                report(error.strerror or "the disk is full")
            return memoryview(data).nbytes


def redirect_output(log_file: str, error_log_file: str | None, *, on_loss: Callable[[str], None]) -> None:
    """Send all output of this process, of its C code and its children to `log_file`, and close its standard input.

    With an `error_log_file`, standard error goes there, and nothing is buffered.
    """
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    send_output_to(log_file, error_log_file, on_loss=on_loss)
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.FileIO(0, closefd=False))  # type: ignore[misc]  # the interpreter itself does so at its start
    unbuffered = error_log_file is not None
    sys.stdout = sys.__stdout__ = _open_stream(1, name="<stdout>", unbuffered=unbuffered, on_loss=on_loss)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _open_stream(2, name="<stderr>", unbuffered=unbuffered, on_loss=on_loss)  # type: ignore[misc]


def send_output_to(
    log_file: str, error_log_file: str | None, *, on_loss: Callable[[str], None] = lambda _reason: None
) -> None:
    """Send what this process writes to its standard output and error, also through open streams, to other files."""
    log = _open(log_file, on_loss)
    error_log = log if error_log_file is None else _open(error_log_file, on_loss)
    for source, target in ((log, 1), (error_log, 2)):
        os.dup2(source, target)
    for descriptor in {log, error_log}:
        os.close(descriptor)


def take_terminal(descriptors: Sequence[int]) -> None:
    """Read from the agent's terminal from now on, and with three descriptors write to it too.

    Args:
        descriptors: Of the agent's standard input, output and error, or of the input alone.
    """
    if len(descriptors) > 1:
        print("rankless: this rank has the terminal (--debug-rank), and writes there", flush=True)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.set_inheritable(number, True)
        os.close(descriptor)
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))  # type: ignore[misc]  # as above
    if len(descriptors) > 1:
        sys.stdout = sys.__stdout__ = _open_terminal_stream(1, "strict")  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = _open_terminal_stream(2, "backslashreplace")  # type: ignore[misc]


def _open_terminal_stream(descriptor: int, errors: str) -> io.TextIOWrapper:
    file = io.BufferedWriter(io.FileIO(descriptor, "wb", closefd=False))
    return io.TextIOWrapper(file, errors=errors, line_buffering=True)


def measure_error_log(path: str) -> int | None:
    """Return the size of the file that gets this process's standard error; None if that is not the file `path`."""
    try:
        opened, named = os.fstat(2), os.stat(path)
    except OSError:
        return None
    return opened.st_size if os.path.samestat(opened, named) else None


def _open(path: str, on_loss: Callable[[str], None]) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, FILE_MODE)
    except OSError as error:
        on_loss(error.strerror or "the log file cannot be made")
        return os.open(os.devnull, os.O_WRONLY)


def _open_stream(descriptor: int, *, name: str, unbuffered: bool, on_loss: Callable[[str], None]) -> io.TextIOWrapper:
    old = sys.__stdout__ if descriptor == 1 else sys.__stderr__
    encoding = old.encoding if old is not None else "utf-8"
    errors = "backslashreplace" if descriptor == 2 else (old.errors if old is not None else None)
    file = LossyLogFile(descriptor, name=name, on_loss=on_loss)
    if unbuffered:  # like torchrun, which starts `python -u`
        return io.TextIOWrapper(file, encoding=encoding, errors=errors, write_through=True)
    binary = io.BufferedWriter(file)
    # Line by line, as on a terminal: the agent shows each line as soon as it is written.
    return io.TextIOWrapper(binary, encoding=encoding, errors=errors, line_buffering=True)

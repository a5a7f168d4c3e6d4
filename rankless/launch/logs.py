"""The log folder of a run, and reading along in the files that workers write there."""

import contextlib
import io
import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TextIO

from rankless.errors import LaunchError

_BLOCK = 1 << 16


def make_run_folder(log_folder: str) -> str:
    """A new folder for one run below `log_folder`, to which `latest` points from now on."""
    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    folder = os.path.join(log_folder, run_id)
    try:
        os.makedirs(folder)
        link = os.path.join(log_folder, f".latest-{run_id}")
        os.symlink(run_id, link)
        os.replace(link, os.path.join(log_folder, "latest"))
    except OSError as error:
        raise LaunchError(
            expected=f"a folder for log files, {folder}",
            found=error.strerror,
            fix="name another folder with --log-dir",
        ) from error
    return folder


def log_file(folder: str, rank: int) -> str:
    """Where a worker's output goes."""
    return os.path.join(folder, f"rank{rank}.log")


class Tail:
    """Reads along in one growing file."""

    def __init__(self, path: str, *, write: Callable[[bytes], None]) -> None:
        self._path = path
        self._write = write
        self._file: io.FileIO | None = None

    def pump(self) -> bool:
        """Pass on what is new; True if there was anything."""
        if self._file is None:
            try:
                self._file = io.FileIO(self._path)
            except OSError:
                return False
        found = False
        while data := self._file.read(_BLOCK):
            self._write(data)
            found = True
        return found

    def close(self) -> None:
        """Pass on the rest."""
        self.pump()
        if self._file is not None:
            self._file.close()


class PrefixedLines:
    """Writes whole lines, each with its rank before it; `close` writes a last line that has no end."""

    def __init__(self, rank: int, *, write: Callable[[bytes], None]) -> None:
        self._prefix = f"[{rank}] ".encode()
        self._write = write
        self._rest = b""

    def write(self, data: bytes) -> None:
        """Write the lines that `data` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if lines:
            self._write(b"".join(self._prefix + line + b"\n" for line in lines))

    def close(self) -> None:
        """Write what is left."""
        if self._rest:
            self._write(self._prefix + self._rest + b"\n")


class Terminal:
    """The ranks' output on the terminal: rank 0's as it is, or all ranks' with prefixes."""

    def __init__(
        self,
        log_files: Sequence[str],
        *,
        out: TextIO,
        show_all: bool,
        making_room: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._out = out
        self._making_room = making_room
        self._lines = [PrefixedLines(rank, write=self._write) for rank in range(len(log_files) if show_all else 0)]
        shown = log_files if show_all else log_files[:1]
        writers: Sequence[Callable[[bytes], None]] = [lines.write for lines in self._lines] or [self._write]
        self._tails = [Tail(path, write=write) for path, write in zip(shown, writers, strict=True)]

    def pump(self) -> None:
        """Show what is new."""
        for tail in self._tails:
            tail.pump()

    def close(self) -> None:
        """Show the rest."""
        for tail in self._tails:
            tail.close()
        for lines in self._lines:
            lines.close()

    def _write(self, data: bytes) -> None:
        # A reader that is gone (`| head`) or a full disk behind the terminal's redirection never stops
        # training.
        with self._making_room(), contextlib.suppress(OSError):
            self._out.flush()
            binary = getattr(self._out, "buffer", None)
            if binary is None:
                self._out.write(data.decode(errors="replace"))
            else:
                binary.write(data)
                binary.flush()

"""Files that ranks other than 0 write to, in place of the script's own, which rank 0 alone writes.

A private file has no name and behaves as the script's: position, size, descriptor, errors. A file that is only written
keeps no data, so a checkpoint of 10 GB takes no second 10 GB; see `HollowFile`. If the script reads such a file before
it closes it, the data of rank 0's file are copied into it, and it keeps data from then on.
"""

import contextlib
import io
import os
import tempfile
from collections.abc import Callable
from typing import Any

FILE_MODES = {
    "r": os.O_RDONLY,
    "w": os.O_CREAT | os.O_TRUNC,
    "x": os.O_CREAT | os.O_EXCL,
    "a": os.O_CREAT | os.O_APPEND,
}
IO_OPEN = io.open
FSTAT = os.fstat
OS_OPEN = os.open
NEW_FILE = tempfile.TemporaryFile


class OpenFile:
    """A file that the script has open to write, on one rank: its own on rank 0, and a private one on the others.

    Args:
        descriptor: Of the file. It stays the script's to close.
        keeps_data: Whether the file has the script's data, so that this rank can read them.
    """

    def __init__(self, descriptor: int, *, keeps_data: bool) -> None:
        self.descriptor = descriptor
        self.keeps_data = keeps_data
        status = FSTAT(descriptor)
        self._identity = status.st_dev, status.st_ino

    @property
    def is_open(self) -> bool:
        """Whether the script has not closed it."""
        try:
            status = FSTAT(self.descriptor)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._identity

    @property
    def path(self) -> str:
        """A path at which it can be opened once more."""
        return f"/dev/fd/{self.descriptor}"

    def read_all(self) -> bytes:
        """Return what has arrived in the file."""
        with IO_OPEN(self.path, "rb") as file:
            return file.read()

    def fill(self, data: bytes) -> None:
        """Give the file the data that it has not kept, and let it keep what follows."""
        descriptor = OS_OPEN(self.path, os.O_WRONLY)  # one that appends would write at the end
        try:
            os.pwrite(descriptor, data, 0)
        finally:
            os.close(descriptor)
        self.keeps_data = True


class HollowFile(io.FileIO):
    """A file of which only position and size change, until its `OpenFile` keeps data."""

    def __init__(self, name: Any, mode: str, *, opener: Callable[[str, int], int]) -> None:
        super().__init__(name, mode, opener=opener)
        self.opened = OpenFile(self.fileno(), keeps_data=False)
        self._appends = "a" in mode

    def write(self, data: Any, /) -> int:
        """Move the position as if the data were written. Returns their number of bytes."""
        if self.opened.keeps_data:
            return super().write(data)
        count = memoryview(data).nbytes
        end = os.lseek(self.fileno(), 0, os.SEEK_END if self._appends else os.SEEK_CUR) + count
        if end > FSTAT(self.fileno()).st_size:
            os.ftruncate(self.fileno(), end)
        os.lseek(self.fileno(), end, os.SEEK_SET)
        return count


def open_new(flags: int, *, content: str | None, size: int) -> int:
    """Return the descriptor of a new private file.

    Args:
        flags: Those of `os.open`, of which access and appending matter.
        content: The path of a file with its first data, or None for none.
        size: Its size if it has no data.
    """
    with NEW_FILE() as file:
        if content is not None:
            with contextlib.suppress(FileNotFoundError), IO_OPEN(content, "rb") as source:
                while chunk := source.read(1 << 20):
                    file.write(chunk)
        elif size:
            file.truncate(size)
        file.flush()
        return OS_OPEN(f"/dev/fd/{file.fileno()}", flags & (os.O_ACCMODE | os.O_APPEND))


def open_hollow(
    name: Any,
    mode: str,
    text: tuple[str | None, str | None, str | None],
    buffering: int,
    *,
    opener: Callable[[str, int], int],
) -> tuple[Any, OpenFile]:
    """Return a file that keeps no data as `open` would, and what is known of it.

    Args:
        name: Its name, as the script gave it.
        mode: That of `open`, without "+".
        text: The encoding, errors and newline of `open`.
        buffering: That of `open`.
        opener: Opens it.
    """
    raw = HollowFile(name, mode.replace("t", "").replace("b", "") + "b", opener=opener)
    if buffering == 0:
        return raw, raw.opened
    size = buffering if buffering > 1 else getattr(raw, "_blksize", io.DEFAULT_BUFFER_SIZE)
    buffered = io.BufferedWriter(raw, size)
    if "b" in mode:
        return buffered, raw.opened
    encoding, errors, newline = text
    wrapped = io.TextIOWrapper(buffered, encoding, errors, newline, line_buffering=buffering == 1)
    wrapped.mode = mode  # type: ignore[misc]  # as `open` does
    return wrapped, raw.opened

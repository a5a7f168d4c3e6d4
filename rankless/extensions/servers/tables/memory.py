"""Address space that takes physical memory where it is written.

Note [reserved memory]: a table reserves addresses for more rows than the host can hold, so that rows and slots never
move when it grows. The kernel gives a page at its first write, filled with zeros.
"""

import contextlib
import math
import mmap
import os
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rankless.extensions.servers.tables.undo_log import NO_LOG, UndoLog

NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if os.uname().sysname == "Linux" else 0)
"""Python names this flag from 3.13 on."""


class ReservedMemory:
    """Zeros, which take memory page by page as they are written.

    Attributes:
        array: The memory, as an array.
        position: Where it begins in the mapping.
    """

    def __init__(
        self, mapping: mmap.mmap, position: int, shape: tuple[int, ...], dtype: DTypeLike, *, release_advice: int
    ) -> None:
        """Take a part of a mapping. `release_advice` makes the kernel take pages of it back."""
        self.position = position
        self._mapping = mapping
        self._release_advice = release_advice
        self.array: NDArray[Any] = np.frombuffer(mapping, dtype, math.prod(shape), position).reshape(shape)

    def release(self, start: int, stop: int) -> None:
        """Give the pages that lie within the bytes from `start` to `stop` back: they are zeros again."""
        first = -(-(self.position + start) // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (self.position + stop) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0:
            self._mapping.madvise(self._release_advice, first, length)


class ArrayMemory(Protocol):
    """Where the arrays of tables are.

    Attributes:
        log: Where changes of arrays are noted before they are made; see Note [undo log] in `undo_log`.
    """

    log: UndoLog

    def reserve(
        self, shape: tuple[int, ...], dtype: DTypeLike, *, sparse: bool, position: int | None
    ) -> ReservedMemory:
        """Reserve memory for an array.

        Args:
            shape: The array's shape. It may exceed the host's memory.
            dtype: Its type.
            sparse: Whether written parts are small and far from each other. Then the kernel gives small pages.
            position: Where an array of an earlier process is. None: a new array of zeros.

        Raises:
            OSError: The process may not reserve that much, for example because of `ulimit -v`.
        """


class ProcessMemory:
    """Memory that ends with the process."""

    log = NO_LOG

    def reserve(
        self, shape: tuple[int, ...], dtype: DTypeLike, *, sparse: bool, position: int | None
    ) -> ReservedMemory:
        """Reserve memory for an array, in a mapping of its own."""
        assert position is None
        size = math.prod(shape) * np.dtype(dtype).itemsize
        mapping = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
        advise_page_size(mapping, 0, len(mapping), sparse=sparse)
        return ReservedMemory(mapping, 0, shape, dtype, release_advice=mmap.MADV_DONTNEED)


def advise_page_size(mapping: mmap.mmap, start: int, length: int, *, sparse: bool) -> None:
    """Tell the kernel which pages to give. A kernel without huge pages gives small ones."""
    advice = getattr(mmap, "MADV_NOHUGEPAGE" if sparse else "MADV_HUGEPAGE", None)
    if advice is not None:
        with contextlib.suppress(OSError):
            mapping.madvise(advice, start, length)

"""Address space that takes physical memory where it is written.

Note [reserved memory]: a table reserves addresses for more rows than the host can hold, so that rows and slots never
move when it grows. The kernel gives a page at its first write, filled with zeros.
"""

import math
import mmap
import os
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if os.uname().sysname == "Linux" else 0)
"""Python names this flag from 3.13 on."""


class ReservedMemory:
    """Zeros, which take memory page by page as they are written."""

    def __init__(self, shape: tuple[int, ...], dtype: DTypeLike, *, sparse: bool) -> None:
        """Reserve memory for an array.

        Args:
            shape: The array's shape. It may exceed the host's memory.
            dtype: Its type.
            sparse: Whether written parts are small and far from each other. Then the kernel gives small pages.

        Raises:
            OSError: The process may not reserve that much, for example because of `ulimit -v`.
        """
        size = math.prod(shape) * np.dtype(dtype).itemsize
        self._memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
        advice = getattr(mmap, "MADV_NOHUGEPAGE" if sparse else "MADV_HUGEPAGE", None)
        if advice is not None:
            self._memory.madvise(advice)
        self.array: NDArray[Any] = np.frombuffer(self._memory, dtype=dtype, count=size // np.dtype(dtype).itemsize)
        self.array = self.array.reshape(shape)

    def release(self, start: int, stop: int) -> None:
        """Give the pages that lie within the bytes from `start` to `stop` back: they are zeros again."""
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = stop // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0:
            self._memory.madvise(mmap.MADV_DONTNEED, first, length)

"""Memory of tables that outlives its process: one file in memory, which the process that starts servers holds open.

Note [durable memory]: the file is sparse. It is mapped once, so that an address is a position. First come its header,
states of tables and two copies of their names and settings, then the undo log, then the arrays. Everything but the log
changes under the log alone, so that the file is always as after a commit, or can be made so. What no table refers to at
a commit, or at the start, is given back: so memory that a transaction makes beside the old one needs no log.
"""

import contextlib
import fcntl
import math
import mmap
import os
import zlib
from collections.abc import Collection

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rankless.errors import TableError
from rankless.extensions.servers.tables.memory import NO_RESERVE, ReservedMemory, advise_page_size
from rankless.extensions.servers.tables.undo_log import WORD_BYTES, UndoLog, is_sound, remember, undo_changes

MOST_BYTES = 1 << 46
"""Size of a new file: half of the addresses that x86 gives a process."""
LEAST_BYTES = 1 << 30
KEPT_LOG_BYTES = 64 << 20
"""Memory of the log that is kept after a commit."""
STATES_BYTES = 4 << 20
TEXT_BYTES = 16 << 20
_STATES_START, _TEXTS_START, _LOG_START = 4096, 8 << 20, 64 << 20
_LOG_PART = 8
"""The log has this part of all addresses, more than the host has memory."""
_ALIGNMENT = 2 << 20
_MAGIC, _VERSION = 0x454C424154525352, 1
_MAGIC_WORD, _VERSION_WORD, _COMMITTED_WORD, _TEXT_WORD, _LENGTH_WORD, _CHECKSUM_WORD, _HEADER_CHECKSUM_WORD = range(7)


class DurableMemory:
    """Arrays in a file in memory, changed by transactions. Whatever a killed process has not committed is undone.

    Attributes:
        log: The undo log.
        states: Words for the tables' states, int64, one-dimensional. Note changes of them in the log.
    """

    def __init__(self, descriptor: int) -> None:
        """Map a file and undo what has not been committed. A file of size 0 gets its size.

        Raises:
            TableError: The file is not one of tables, is damaged, or cannot be mapped.
        """
        _lock(descriptor)
        self._mapping, size = _map(descriptor)
        self._bytes: NDArray[np.uint8] = np.frombuffer(self._mapping, np.uint8)
        words: NDArray[np.int64] = np.frombuffer(self._mapping, np.int64)
        self._header = words[: _HEADER_CHECKSUM_WORD + 1]
        self.states = words[_STATES_START // WORD_BYTES :][: STATES_BYTES // WORD_BYTES]
        self._arrays_start = _LOG_START + size // _LOG_PART
        log_words = words[_LOG_START // WORD_BYTES : self._arrays_start // WORD_BYTES]
        self.log = UndoLog(log_words, self._bytes.ctypes.data)
        self._sizes: dict[int, int] = {}
        """By position, of all arrays."""
        if not self._header[[_MAGIC_WORD, _COMMITTED_WORD, _LENGTH_WORD]].any():  # new, or killed in these lines
            self._set_header(0, 0, b"")
            self._header[_VERSION_WORD] = _VERSION
            self._header[_MAGIC_WORD] = _MAGIC
        self._check_header()
        if self.is_open:  # otherwise the functions need not be loaded
            require_sound(is_sound(self.log, self._bytes), "an undo log of changes of this memory", "a damaged log")
            self.undo()
        expected_checksum = zlib.crc32(self._header[_COMMITTED_WORD:_HEADER_CHECKSUM_WORD].tobytes())
        require_sound(
            int(self._header[_HEADER_CHECKSUM_WORD]) == expected_checksum
            and 0 <= self._header[_LENGTH_WORD] <= TEXT_BYTES
            and self._header[_TEXT_WORD] in (0, 1),
            f"a header with the checksum {expected_checksum}",
            int(self._header[_HEADER_CHECKSUM_WORD]),
        )
        checksum = zlib.crc32(self.text)
        require_sound(
            int(self._header[_CHECKSUM_WORD]) == checksum,
            f"tables with the checksum {int(self._header[_CHECKSUM_WORD])}",
            checksum,
        )

    @property
    def committed(self) -> int:
        """The last transaction that has been committed. 0: none."""
        return int(self._header[_COMMITTED_WORD])

    @property
    def text(self) -> bytes:
        """What describes the tables."""
        start = _TEXTS_START + int(self._header[_TEXT_WORD]) * TEXT_BYTES
        return self._bytes[start : start + int(self._header[_LENGTH_WORD])].tobytes()

    @property
    def positions(self) -> Collection[int]:
        """Where there are arrays."""
        return self._sizes.keys()

    @property
    def is_open(self) -> bool:
        """Whether something has changed since the last commit."""
        return int(self.log.words[0]) != 0

    def set_text(self, text: bytes) -> None:
        """Change what describes the tables, under the log: the new text lies beside the old one."""
        copy = 1 - int(self._header[_TEXT_WORD])
        start = _TEXTS_START + copy * TEXT_BYTES
        self._bytes[start : start + len(text)] = np.frombuffer(text, np.uint8)
        remember(self.log, self._header[_COMMITTED_WORD:])
        self._set_header(self.committed, copy, text)

    def set_committed(self, transaction: int) -> None:
        """Change the number of the last transaction, under the log."""
        remember(self.log, self._header[_COMMITTED_WORD:])
        self._set_header(transaction, int(self._header[_TEXT_WORD]), self.text)

    def commit(self) -> None:
        """Make all changes final, by one store."""
        used = (int(self.log.words[0]) + 1) * WORD_BYTES
        self.log.words[0] = 0
        if used > KEPT_LOG_BYTES:
            self._release(_LOG_START + KEPT_LOG_BYTES, _LOG_START + used)

    def undo(self) -> None:
        """Undo all changes since the last commit. It may be interrupted, and done again."""
        if self.is_open:
            undo_changes(self.log, self._bytes)
            self.commit()

    def reserve(
        self, shape: tuple[int, ...], dtype: DTypeLike, *, sparse: bool, position: int | None
    ) -> ReservedMemory:
        """Reserve memory for an array; see `ArrayMemory`."""
        size = max(-(-math.prod(shape) * np.dtype(dtype).itemsize // _ALIGNMENT), 1) * _ALIGNMENT
        if position is None:
            position = self._find_gap(size)
        require_sound(
            self._arrays_start <= position <= len(self._mapping) - size,
            f"an array of {size:,} bytes within {len(self._mapping):,}",
            f"its position {position:,}",
        )
        if position not in self._sizes:
            advise_page_size(self._mapping, position, size, sparse=sparse)
        self._sizes[position] = size
        return ReservedMemory(self._mapping, position, shape, dtype, release_advice=mmap.MADV_REMOVE)

    def keep_only(self, positions: Collection[int]) -> None:
        """Give back all memory but that of the arrays at these positions."""
        self._sizes = {position: self._sizes[position] for position in sorted(positions)}
        start = self._arrays_start
        for position, size in (*self._sizes.items(), (len(self._mapping), 0)):
            self._release(start, position)
            start = position + size

    def close(self) -> None:
        """Unmap the memory, as soon as no array of it is in use."""
        del self._bytes, self._header, self.states, self.log
        with contextlib.suppress(BufferError):
            self._mapping.close()

    def _find_gap(self, size: int) -> int:
        start = self._arrays_start
        for position in sorted(self._sizes):
            if position - start >= size:
                break
            start = position + self._sizes[position]
        if start + size > len(self._mapping):
            raise OSError(f"{len(self._mapping):,} bytes of addresses are in use")
        return start

    def _release(self, start: int, stop: int) -> None:
        if stop > start:
            self._mapping.madvise(mmap.MADV_REMOVE, start, stop - start)

    def _set_header(self, transaction: int, copy: int, text: bytes) -> None:
        self._header[_COMMITTED_WORD:_HEADER_CHECKSUM_WORD] = (transaction, copy, len(text), zlib.crc32(text))
        self._header[_HEADER_CHECKSUM_WORD] = zlib.crc32(self._header[_COMMITTED_WORD:_HEADER_CHECKSUM_WORD].tobytes())

    def _check_header(self) -> None:
        found = (int(self._header[_MAGIC_WORD]), int(self._header[_VERSION_WORD]))
        require_sound(
            found == (_MAGIC, _VERSION),
            f"memory of tables: {_MAGIC:#x}, version {_VERSION}",
            f"{found[0]:#x}, {found[1]}",
        )


def require_sound(condition: bool | np.bool_, expected: str, found: object) -> None:
    """Raise TableError if memory is not what tables have left."""
    if not condition:
        raise TableError(
            expected=f"{expected} in the memory that outlives servers",
            found=found,
            fix="end the run and start it again from its last checkpoint; if that recurs, report this to Rankless",
        )


def _lock(descriptor: int) -> None:
    """Keep other processes away until this one ends, or unmaps the file."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise TableError(
            expected="tables in memory that no other process uses",
            found=str(error),
            fix="wait until the earlier process of the server has ended",
        ) from None


def _map(descriptor: int) -> tuple[mmap.mmap, int]:
    try:
        size = os.fstat(descriptor).st_size
        if size == 0:
            size = MOST_BYTES
            os.ftruncate(descriptor, size)
        require_sound(size >= LEAST_BYTES, f"a file of at least {LEAST_BYTES:,} bytes", f"{size:,} bytes")
        return mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | NO_RESERVE), size
    except (OSError, ValueError) as error:
        raise TableError(
            expected="to map a file in memory, which keeps tables when their server ends",
            found=str(error),
            fix="raise the limit of address space (ulimit -v)",
        ) from None

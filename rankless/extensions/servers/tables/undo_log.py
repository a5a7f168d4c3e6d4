"""What undoes an unfinished transaction: the old bytes of everything that it changes.

Note [undo log]: tables whose memory outlives the process note old bytes in a log before they change them. The log is in
the same memory. A record is the old bytes, padded to words, then their position in the memory and their number. A
negative number stands for bytes that were zeros, which the record leaves out. The log's first word is the number of
words in use after it; 0 in it is what commits a transaction. Undoing goes through the records backwards, and may itself
be interrupted and begin anew, as it changes nothing in the log.

The order is: write the record, count it, change the bytes. A killed process has stored what its instructions before one
of them say, and nothing of the later ones, whatever the processor has reordered. So only the compiler has to keep the
order, and `_keep_order` makes it: a fence between threads of which there is one, C's `atomic_signal_fence`. It has no
machine code.

What needs no record: bytes of rows and memory that the transaction has made itself, which nobody reads after it is
undone.
"""

from typing import Any, NamedTuple

import numpy as np
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from rankless.extensions.servers.tables.compiled_functions import compiled

WORD_BYTES = 8
_COUNT = 0
"""The first word."""


class UndoLog(NamedTuple):
    """A log, as numba takes it.

    Args:
        words: Number of words in use, then the words, int64. No words at all: nothing is logged.
        base: The address of the memory that positions count from.
    """

    words: NDArray[np.int64]
    base: int


NO_LOG = UndoLog(np.empty(0, np.int64), 0)


@intrinsic
def _keep_order(_context: Any = None) -> Any:
    """Keep the compiler from moving loads and stores across this call."""

    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        builder.fence("seq_cst", targetscope="singlethread")
        return context.get_dummy_value()

    return types.void(), generate


@compiled
def remember(log: UndoLog, part: NDArray[Any]) -> None:
    """Log a part of an array, contiguous and of one dimension, that is about to change."""
    if log.words.shape[0] > 0:
        size = part.shape[0] * part.itemsize
        words = (size + WORD_BYTES - 1) // WORD_BYTES
        end = log.words[_COUNT] + 1
        copy = log.words[end : end + words].view(part.dtype)
        for number in range(part.shape[0]):
            copy[number] = part[number]
        _end_record(log, end + words, np.int64(part.ctypes.data) - log.base, size)
        _count_words(log, end + words + 1)


@compiled
def remember_zeros(log: UndoLog, part: NDArray[np.int64], count: int | np.int64) -> None:
    """Log that `count` elements from the beginning of a part of an array are zeros."""
    if log.words.shape[0] > 0:
        end = log.words[_COUNT] + 1
        _end_record(log, end, np.int64(part.ctypes.data) - log.base, -count * WORD_BYTES)
        _count_words(log, end + 1)


@compiled
def remember_elements(log: UndoLog, array: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
    """Log elements of an array, int64, that are about to change. Negative numbers are left out."""
    if log.words.shape[0] > 0:
        end = log.words[_COUNT] + 1
        start = np.int64(array.ctypes.data) - log.base
        for number in numbers:
            if number >= 0:
                log.words[end] = array[number]
                _end_record(log, end + 1, start + number * WORD_BYTES, WORD_BYTES)
                end += 3
        _count_words(log, end - 1)


@compiled
def remember_rows(log: UndoLog, array: NDArray[Any], numbers: NDArray[np.int64]) -> None:
    """Log rows of an array of two dimensions that are about to change. Negative numbers are left out."""
    if log.words.shape[0] > 0:
        end = log.words[_COUNT] + 1
        start = np.int64(array.ctypes.data) - log.base
        size = array.shape[1] * array.itemsize
        words = (size + WORD_BYTES - 1) // WORD_BYTES
        copy = log.words[end : end + len(numbers) * (words + 2)].view(array.dtype)
        record, record_items = 0, (words + 2) * WORD_BYTES // array.itemsize
        for number in numbers:
            if number >= 0:
                for column in range(array.shape[1]):
                    copy[record + column] = array[number, column]
                _end_record(log, end + words, start + number * size, size)
                record += record_items
                end += words + 2
        _count_words(log, end - 1)


@compiled
def _end_record(log: UndoLog, end: int | np.int64, position: int | np.int64, size: int | np.int64) -> None:
    """Write the last two words of a record."""
    log.words[end] = position
    log.words[end + 1] = size


@compiled
def _count_words(log: UndoLog, count: int | np.int64) -> None:
    """Count the records that have been written."""
    _keep_order()
    log.words[_COUNT] = count
    _keep_order()


@compiled
def is_sound(log: UndoLog, memory: NDArray[np.uint8]) -> bool | np.bool_:
    """Return whether all records are of bytes in the memory."""
    last = log.words[_COUNT]
    if not 0 <= last < log.words.shape[0]:
        return False
    while last > 1:
        position, size = log.words[last - 1], log.words[last]
        if not (0 <= position <= memory.shape[0] and abs(size) <= memory.shape[0] - position):
            return False
        last -= 2 + (max(size, 0) + WORD_BYTES - 1) // WORD_BYTES
    return bool(last == 0)


@compiled
def undo_changes(log: UndoLog, memory: NDArray[np.uint8]) -> None:
    """Write the old bytes of all records, the latest first. The log stays as it is."""
    last = log.words[_COUNT]
    while last > 1:
        position, size = log.words[last - 1], log.words[last]
        last -= 2
        if size < 0:
            memory[position : position - size] = 0
        else:
            last -= (size + WORD_BYTES - 1) // WORD_BYTES
            old = log.words[last + 1 :].view(np.uint8)
            for number in range(size):
                memory[position + number] = old[number]

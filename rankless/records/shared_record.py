"""A record in a part of a shared file: one process writes it again and again, and others read the latest one.

Note [sequence lock]: the writer never waits. It makes the sequence number odd, writes, and makes the number even again.
A reader takes a copy, and takes another one if the number is odd or the checksum is wrong. The checksum also finds a
copy that a processor has put together from two records.
"""

import os
import struct
import sys
import tempfile
import time
import zlib
from typing import NamedTuple

_HEADER = struct.Struct("=QQQ")
_SEQUENCE, _LENGTH, _CHECKSUM = range(3)
_ATTEMPTS = 20
_PAUSE_SECONDS = 0.001


class SharedRecord(NamedTuple):
    """A copy of the latest record, and its number: a later record has a higher one."""

    sequence: int
    data: bytes


def open_shared_file(name: str, size: int) -> int | None:
    """Open a new file in memory that readers find by its name, and return its descriptor; None outside Linux.

    Args:
        name: What `/proc/PID/fd` shows of it, after "/memfd:".
        size: In bytes. Pages that nobody writes take no memory.
    """
    if sys.platform != "linux":
        return None
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(name)
    else:
        with tempfile.TemporaryFile(prefix=name) as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


class RecordWriter:
    """Writes records into a part of a shared file. See Note [sequence lock].

    Args:
        memory: The part of the mapped file, in bytes. It begins at a multiple of 8, with a header of 24 bytes.
    """

    def __init__(self, memory: memoryview) -> None:
        self._fields = memory[: _HEADER.size].cast("Q")
        self._data = memory[_HEADER.size :]

    @property
    def capacity(self) -> int:
        """The most bytes of a record."""
        return len(self._data)

    def write(self, data: bytes) -> None:
        """Write a record of at most `capacity` bytes."""
        fields = self._fields
        before = fields[_SEQUENCE] | 1  # a process that was killed within a record leaves an odd number
        fields[_SEQUENCE] = before
        fields[_LENGTH], fields[_CHECKSUM] = len(data), zlib.crc32(data)
        self._data[: len(data)] = data
        fields[_SEQUENCE] = before + 1


def read_record(descriptor: int, *, offset: int = 0, size: int | None = None) -> SharedRecord | None:
    """Return the latest record of a part of a shared file; None if there is none, or none that is whole.

    Args:
        descriptor: The file.
        offset: The first byte of the part.
        size: The bytes of the part; None: up to the end of the file.
    """
    size = os.fstat(descriptor).st_size - offset if size is None else size
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE_SECONDS)
        copy = os.pread(descriptor, size, offset)
        if len(copy) < _HEADER.size:
            return None
        sequence, length, checksum = _HEADER.unpack_from(copy)
        if sequence == 0:
            return None
        data = copy[_HEADER.size : _HEADER.size + length]
        if sequence % 2 == 0 and len(data) == length and zlib.crc32(data) == checksum:
            return SharedRecord(sequence, data)
    return None


def read_sequence(descriptor: int, *, offset: int = 0) -> int:
    """Return the number of the latest record; it is odd while one is being written, and 0 before the first."""
    header = os.pread(descriptor, _HEADER.size, offset)
    return int(_HEADER.unpack(header)[_SEQUENCE]) if len(header) == _HEADER.size else 0

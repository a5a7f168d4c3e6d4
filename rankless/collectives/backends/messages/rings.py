"""A ring buffer of bytes for each ordered pair of ranks, in the memory of a group.

The sender counts the bytes that it has written, the receiver those that it has read. The difference is what the ring
holds. Bytes are written before they are counted, and read before they are counted as read.
"""

from dataclasses import dataclass

import torch

from rankless.records.group_failures import WORD_BYTES

_COUNTER_BYTES = 128
_ALL_RINGS_BYTES = 4 << 20
_SMALLEST_RING_BYTES = 16 << 10
_LARGEST_RING_BYTES = 512 << 10


@dataclass(frozen=True)
class RingLayout:
    """Where the rings of a group with `size` ranks lie, in bytes from the start of their memory."""

    size: int

    @property
    def ring_bytes(self) -> int:
        """The bytes that a ring can hold, a power of two."""
        share = _ALL_RINGS_BYTES // max(1, self.size * (self.size - 1))
        return min(_LARGEST_RING_BYTES, max(_SMALLEST_RING_BYTES, 1 << (share.bit_length() - 1)))

    @property
    def byte_count(self) -> int:
        """The bytes of all rings and their counters."""
        return self.size * self.size * (2 * _COUNTER_BYTES + self.ring_bytes)

    def start(self, sender: int, receiver: int) -> int:
        """The first byte of a ring's counters. Its data follow."""
        return (sender * self.size + receiver) * (2 * _COUNTER_BYTES + self.ring_bytes)


class MessageRing:
    """The ring from one rank to another.

    Args:
        memory: The memory of all rings, a flat uint8 tensor.
        words: The same memory as 64-bit words.
        layout: Where the rings lie.
        sender: The rank that writes.
        receiver: The rank that reads.
    """

    def __init__(
        self, memory: torch.Tensor, words: memoryview, layout: RingLayout, *, sender: int, receiver: int
    ) -> None:
        start = layout.start(sender, receiver)
        self._words, self._capacity = words, layout.ring_bytes
        self._written = start // WORD_BYTES
        self._read = (start + _COUNTER_BYTES) // WORD_BYTES
        self._data = memory[start + 2 * _COUNTER_BYTES :][: layout.ring_bytes]

    @property
    def space(self) -> int:
        """How many bytes can be written."""
        return self._capacity - self.length

    @property
    def length(self) -> int:
        """How many bytes can be read."""
        return int(self._words[self._written] - self._words[self._read])

    def write(self, data: torch.Tensor) -> int:
        """Write as many of the bytes as there is space for, and return their number."""
        count = min(self.space, len(data))
        written = self._words[self._written]
        place = written % self._capacity
        until_end = min(count, self._capacity - place)
        if until_end:
            self._data[place : place + until_end].copy_(data[:until_end])
        if count > until_end:
            self._data[: count - until_end].copy_(data[until_end:count])
        self._words[self._written] = written + count
        return count

    def read(self, target: torch.Tensor) -> int:
        """Read as many bytes as there are and the target takes, and return their number."""
        count = min(self.length, len(target))
        read = self._words[self._read]
        place = read % self._capacity
        until_end = min(count, self._capacity - place)
        if until_end:
            target[:until_end].copy_(self._data[place : place + until_end])
        if count > until_end:
            target[until_end:count].copy_(self._data[: count - until_end])
        self._words[self._read] = read + count
        return count

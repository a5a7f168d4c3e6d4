"""The slot of each rank in a group's memory, and the rounds in which ranks write their own and read the others'.

Note [halves]: a slot has two halves. A call is cut into rounds that use them in turn. In a round a rank writes into
its own half, posts a phase, waits for the ranks whose data it needs, and reads their halves. Before it writes into a
half again, it waits until all ranks have posted the first phase of the round in between: they have then left the
round that used this half before. So a rank can be one round ahead of another, and no rank waits for readers.
"""

from collections.abc import Iterator, Sequence

import torch

from rankless.collectives.backends.futex_signals import GroupSignals
from rankless.collectives.backends.group_failure_errors import make_mismatch_error
from rankless.collectives.backends.operation_signature import describe_signature
from rankless.records.group_failure_codes import FailureKind

HALF_BYTES = 1 << 20
ALIGNMENT_BYTES = 64
_MOST_CUTS = 256


def count_slot_bytes(size: int) -> int:
    """Return how many bytes the slots of a group with `size` ranks take."""
    return 2 * size * HALF_BYTES


class Slots:
    """The slots of all ranks of a group, and this rank's rounds.

    Args:
        memory: A flat uint8 tensor of `count_slot_bytes` bytes, shared by the ranks.
        signals: Connects the ranks.
    """

    def __init__(self, memory: torch.Tensor, signals: GroupSignals) -> None:
        self.signals, self.rank, self.size = signals, signals.rank, signals.size
        halves = memory.split(HALF_BYTES)
        self._halves = [[halves[2 * rank + half] for rank in range(self.size)] for half in range(2)]
        self._views = {torch.uint8: self._halves}
        self._cuts: dict[tuple[int, torch.dtype, int], list[torch.Tensor]] = {}
        self._half = 0
        self._last_round = 0
        self.region_bytes = HALF_BYTES // self.size // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        """The size of a part of a half, where a half has one for each rank."""

    def begin_round(self, table: Sequence[int] = ()) -> int:
        """Return the number of the half that this rank may write.

        Args:
            table: What this rank publishes about its call, at the first round of a call: the signature first.

        Raises:
            CollectiveError: The group cannot be used, or a rank does not leave the half within the timeout.
        """
        signals = self.signals
        signals.wait_for_all(self._last_round)
        self._half ^= 1
        self._last_round = signals.phase + 1
        if table:
            signals.check()
            signals.write_table(self._half, table)
        return self._half

    def view(self, half: int, dtype: torch.dtype = torch.uint8) -> list[torch.Tensor]:
        """Return a half of each rank's slot as a flat tensor of the dtype."""
        if dtype not in self._views:
            with torch.inference_mode(False):
                self._views[dtype] = [[slot.view(dtype) for slot in slots] for slots in self._halves]
        return self._views[dtype][half]

    def cut(self, half: int, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
        """Return the first values of a half of each rank's slot."""
        key = (half, dtype, count)
        if key not in self._cuts:
            if len(self._cuts) >= _MOST_CUTS:
                self._cuts.clear()
            with torch.inference_mode(False):
                self._cuts[key] = [view[:count] for view in self.view(half, dtype)]
        return list(self._cuts[key])

    def require_signature(self, half: int, signature: int, rank: int) -> None:
        """Raise a `CollectiveError` on this rank, and end the group, unless a rank makes the same call as this one."""
        other = self.signals.read_table(rank, half, 0)
        if other != signature:
            self.refuse(rank, found=describe_signature(other), own=describe_signature(signature))

    def require_length(self, half: int, index: int, rank: int, byte_count: int) -> None:
        """Raise a `CollectiveError` on this rank, and end the group, unless a rank sends this rank so many bytes."""
        sent = self.signals.read_table(rank, half, index)
        if sent != byte_count:
            self.refuse(rank, found=f"it sends {sent} bytes", own=f"receives {byte_count} bytes from it")

    def refuse(self, rank: int, *, found: str, own: str) -> None:
        """End the group, because a rank's call does not match this rank's, and raise the error that says so."""
        names = self.signals.member.global_ranks
        self.signals.end_group(FailureKind.MISMATCH, self.rank)
        raise make_mismatch_error(names[rank], names[self.rank], found=found, own=own)


def split_rounds(count: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each piece of `count` values, of which a round takes `most`."""
    for start in range(0, count, most):
        yield start, min(count, start + most)


def split_shares(count: int, size: int) -> list[tuple[int, int]]:
    """Return the start and the end of each rank's share of `count` values."""
    return [(count * rank // size, count * (rank + 1) // size) for rank in range(size)]

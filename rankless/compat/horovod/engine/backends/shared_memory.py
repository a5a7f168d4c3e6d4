"""Reducing in memory that the ranks of one host share.

Note [two shots]: every rank copies a piece of its values into its own slot; when all have, each reduces its share of
the piece over all slots, in the order of ranks, and leaves it in its slot; when all have, each takes all shares. Slots
have two halves, used by turns: who writes into a half again has waited for a later piece of everybody, and everybody
had taken what was in it before.

Note [across hosts]: where all hosts have equally many ranks, their first ranks own the same share of a piece, their
second ranks the next, and so on. Once shares are reduced here, the owners of the same share combine theirs: a host
sends as much as if it had one rank, and all its ranks send a part of it. Horovod calls it hierarchical, or a torus.

Stores of one core are seen by the others in their order on x86 only, so other machines use a group.
"""

import mmap
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from rankless.collectives.call_signature import format_ranks
from rankless.collectives.shared_memory import create_shared_file
from rankless.compat.horovod.common.exceptions import HorovodInternalError
from rankless.compat.horovod.engine.backends.process_group import GroupPlane
from rankless.compat.horovod.engine.backends.store_exchange import awaited
from rankless.compat.horovod.engine.scaling import Reducing
from rankless.errors import CollectiveError

HALF_BYTES = 2 << 20
COUNTER_BYTES = 64
SPINS = 200
LOOK_SECONDS = 0.05
NAP_SECONDS = 0.00005
LONGEST_NAP_SECONDS = 0.001


@dataclass(frozen=True)
class Slots:
    """Where ranks of one host put their values: a mapped file, the ranks in the order of places, and this one's."""

    memory: mmap.mmap
    ranks: Sequence[int]
    place: int


class SharedMemoryPlane:
    """Allreduce for the ranks of one host, or of several hosts if `across` combines one rank's of each.

    `check` raises if a peer is gone; it is called while waiting. Who does not come in time, once all have submitted, is
    stopped: `HorovodInternalError` names its rank.
    """

    def __init__(
        self, slots: Slots, *, check: Callable[[], None], timeout_seconds: float, across: GroupPlane | None = None
    ) -> None:
        self._ranks, self._place, self._size, self._check = slots.ranks, slots.place, len(slots.ranks), check
        self._across = across
        self._timeout_seconds = timeout_seconds
        self._memory = slots.memory
        self._words = memoryview(slots.memory).cast("Q")
        start = self._size * COUNTER_BYTES
        self._halves = [
            [_bytes_at(slots.memory, start + (2 * rank + half) * HALF_BYTES) for half in range(2)]
            for rank in range(self._size)
        ]
        self._phase = 0
        self._half = 0

    @property
    def activity(self) -> str:
        """What it is called in a timeline."""
        return "SHARED_MEMORY_ALLREDUCE" if self._across is None else "HIERARCHICAL_ALLREDUCE"

    def allreduce(self, given: Sequence[torch.Tensor], taken: Sequence[torch.Tensor], reducing: Reducing) -> None:
        """Combine the given tensors of all ranks into those to be taken; all are contiguous and of one type."""
        most = HALF_BYTES // given[0].element_size()
        for sources, targets in zip(_pieces(given, most), _pieces(taken, most), strict=True):
            self._reduce(sources, targets, reducing)

    def _reduce(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], reducing: Reducing) -> None:
        count, dtype = sum(map(len, sources)), sources[0].dtype
        width = count * sources[0].element_size()
        slots = [halves[self._half][:width].view(dtype) for halves in self._halves]
        _copy(sources, list(slots[self._place].split([len(one) for one in sources])))
        reducing.before(slots[self._place])
        self._meet()
        shares = _shares(count, self._size)
        start, end = shares[self._place]
        if end > start:
            total = reducing.combine(slots[0][start:end], slots[1][start:end])
            for slot in slots[2:]:
                reducing.combine(total, slot[start:end], out=total)
            if self._across is not None:
                self._across.allreduce(total, reducing.reduction)
            slots[self._place][start:end] = reducing.after(total)
        self._meet()
        for owner, (start, end) in enumerate(shares):
            _take(slots[owner], start, end, targets)
        self._half = 1 - self._half

    def _meet(self) -> None:
        """Wait until all ranks have come here."""
        self._phase += 1
        words, phase = self._words, self._phase
        step = COUNTER_BYTES // 8
        words[self._place * step] = phase
        waiting = [rank * step for rank in range(self._size) if rank != self._place]
        spins, looked, start, nap = 0, 0.0, 0.0, NAP_SECONDS
        while any(words[at] < phase for at in waiting):
            spins += 1
            if spins <= SPINS:
                time.sleep(0)
                continue
            time.sleep(nap)
            nap = min(nap * 1.2, LONGEST_NAP_SECONDS)
            now = time.monotonic()
            looked, start = looked or now, start or now
            if now - looked > LOOK_SECONDS:
                looked = now
                self._check()
            if now - start > self._timeout_seconds and (late := [at // step for at in waiting if words[at] < phase]):
                error = CollectiveError(
                    expected="all ranks of the process set to come to a reduction that all have submitted",
                    found=f"no sign of {format_ranks([self._ranks[place] for place in late])} "
                    f"for {self._timeout_seconds:g} s",
                    fix="see whether its process is stopped or starved; HOROVOD_GLOO_TIMEOUT_SECONDS waits longer",
                )
                raise HorovodInternalError(str(error))


def open_slots(
    store: Any, *, ranks: Sequence[int], place: int, check: Callable[[], None], timeout_seconds: float
) -> Slots | None:
    """The slots of these ranks of one host, which open them at the same store; None if there is no such memory.

    Raises HorovodInternalError if the first does not come in time, or is gone.
    """
    size = len(ranks)
    count = size * (COUNTER_BYTES + 2 * HALF_BYTES)
    if place == 0:
        store.set("memory", create_shared_file(count))
    path = awaited(store, "memory", check=check, timeout_seconds=timeout_seconds).decode()
    if not path:
        return None
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), count)
    if store.add("opened", 1) == size:  # all have it now; its name may go
        with suppress(OSError):
            os.unlink(path)
    return Slots(memory, ranks, place)


def is_ordered_here() -> bool:
    """Whether this machine's cores see each other's stores in order."""
    return platform.machine().lower() in ("x86_64", "amd64")


def _bytes_at(memory: mmap.mmap, start: int) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8, count=HALF_BYTES, offset=start)


def _pieces(tensors: Sequence[torch.Tensor], most: int) -> list[list[torch.Tensor]]:
    """The tensors, flat, cut into pieces of at most so many values."""
    pieces: list[list[torch.Tensor]] = [[]]
    room = most
    for tensor in (one.detach().reshape(-1) for one in tensors):
        while len(tensor):
            if not room:
                pieces.append([])
                room = most
            pieces[-1].append(tensor[:room])
            tensor = tensor[len(pieces[-1][-1]) :]
            room -= len(pieces[-1][-1])
    return pieces


def _shares(count: int, size: int) -> list[tuple[int, int]]:
    return [(count * rank // size, count * (rank + 1) // size) for rank in range(size)]


def _copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    if len(sources) == 1:
        targets[0].copy_(sources[0])
    else:
        torch._foreach_copy_(list(targets), list(sources))


def _take(slot: torch.Tensor, start: int, end: int, piece: Sequence[torch.Tensor]) -> None:
    """Copy one rank's share out of its slot, into the parts of the tensors that it covers."""
    sources, targets, at = [], [], 0
    for tensor in piece:
        first, last = max(start, at), min(end, at + len(tensor))
        if first < last:
            sources.append(slot[first:last])
            targets.append(tensor[first - at : last - at])
        at += len(tensor)
    if sources:
        _copy(sources, targets)

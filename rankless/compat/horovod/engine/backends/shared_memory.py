"""Allreduce in memory that the ranks of one host share.

Note [two shots]: every rank copies a chunk of its values into its own slot. When all have done so, each rank reduces
its share of the chunk over all slots, in rank order, and writes the result into its own slot. When all have done so,
each rank copies all shares out. A slot has two halves, which chunks use in turn. Before a rank writes into a half
again, it has waited for a later chunk of every rank, so every rank has copied the earlier chunk out.

Note [across hosts]: where all hosts have equally many ranks, the ranks with the same local index own the same share of
a chunk. After the reduction within the hosts, the owners of the same share combine theirs. A host sends as much as if
it had one rank, and all its ranks send a part of it. Horovod calls this hierarchical, or torus.

Other cores see the stores of one core in order on x86 only, so other machines use a process group.
"""

import mmap
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from rankless.collectives.call_signature import format_ranks
from rankless.collectives.shared_memory_file import create_shared_file
from rankless.compat.horovod.engine.backends.process_group import ProcessGroupBackend
from rankless.compat.horovod.engine.backends.store_exchange import wait_for_key
from rankless.compat.horovod.engine.scaling import ScaledReduction
from rankless.compat.horovod.exceptions import HorovodInternalError
from rankless.errors import CollectiveError

HALF_BYTES = 2 << 20
COUNTER_BYTES = 64
SPIN_COUNT = 200
CHECK_SECONDS = 0.05
MIN_SLEEP_SECONDS = 0.00005
MAX_SLEEP_SECONDS = 0.001


@dataclass(frozen=True)
class SharedSlots:
    """The slots of a host's ranks in a mapped file, and this rank's index among `ranks`."""

    memory: mmap.mmap
    ranks: Sequence[int]
    index: int


class SharedMemoryBackend:
    """Allreduce for the ranks of one host, or of several hosts.

    With several hosts, `cross_host` connects the ranks that have the same local index.

    Calls `check` while waiting, which raises if a peer is gone. Raises `HorovodInternalError` with the missing rank if
    a rank does not take part within the timeout after all have submitted.
    """

    def __init__(
        self,
        slots: SharedSlots,
        *,
        check: Callable[[], None],
        timeout_seconds: float,
        cross_host: ProcessGroupBackend | None = None,
    ) -> None:
        self._ranks, self._index, self._size, self._check = slots.ranks, slots.index, len(slots.ranks), check
        self._cross_host = cross_host
        self._timeout_seconds = timeout_seconds
        self._memory = slots.memory
        self._counters = memoryview(slots.memory).cast("Q")
        start = self._size * COUNTER_BYTES
        self._halves = [
            [_view_half(slots.memory, start + (2 * rank + half) * HALF_BYTES) for half in range(2)]
            for rank in range(self._size)
        ]
        self._phase = 0
        self._half = 0

    @property
    def activity(self) -> str:
        """The backend's name in a timeline."""
        return "SHARED_MEMORY_ALLREDUCE" if self._cross_host is None else "HIERARCHICAL_ALLREDUCE"

    def allreduce(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], reduction: ScaledReduction
    ) -> None:
        """Combine the inputs of all ranks into the outputs. All are contiguous and have the same dtype."""
        max_count = HALF_BYTES // inputs[0].element_size()
        for sources, targets in zip(
            _split_into_chunks(inputs, max_count), _split_into_chunks(outputs, max_count), strict=True
        ):
            self._reduce(sources, targets, reduction)

    def _reduce(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], reduction: ScaledReduction
    ) -> None:
        count, dtype = sum(map(len, sources)), sources[0].dtype
        width = count * sources[0].element_size()
        slots = [halves[self._half][:width].view(dtype) for halves in self._halves]
        _copy(sources, list(slots[self._index].split([len(one) for one in sources])))
        reduction.apply_prescale(slots[self._index])
        self._barrier()
        shares = _split_evenly(count, self._size)
        start, end = shares[self._index]
        if end > start:
            total = reduction.combine(slots[0][start:end], slots[1][start:end])
            for slot in slots[2:]:
                reduction.combine(total, slot[start:end], out=total)
            if self._cross_host is not None:
                self._cross_host.allreduce(total, reduction.reduction)
            slots[self._index][start:end] = reduction.finish(total)
        self._barrier()
        for owner, (start, end) in enumerate(shares):
            _copy_share(slots[owner], start, end, targets)
        self._half = 1 - self._half

    def _barrier(self) -> None:
        """Wait until all ranks have called this."""
        self._phase += 1
        counters, phase = self._counters, self._phase
        step = COUNTER_BYTES // 8
        counters[self._index * step] = phase
        waiting = [rank * step for rank in range(self._size) if rank != self._index]
        spins, last_check, start, sleep_seconds = 0, 0.0, 0.0, MIN_SLEEP_SECONDS
        while any(counters[offset] < phase for offset in waiting):
            spins += 1
            if spins <= SPIN_COUNT:
                time.sleep(0)
                continue
            time.sleep(sleep_seconds)
            sleep_seconds = min(sleep_seconds * 1.2, MAX_SLEEP_SECONDS)
            now = time.monotonic()
            last_check, start = last_check or now, start or now
            if now - last_check > CHECK_SECONDS:
                last_check = now
                self._check()
            if now - start > self._timeout_seconds and (
                late := [offset // step for offset in waiting if counters[offset] < phase]
            ):
                error = CollectiveError(
                    expected="all ranks of the process set to take part in a reduction that all have submitted",
                    found=f"{format_ranks([self._ranks[index] for index in late])} did not take part "
                    f"within {self._timeout_seconds:g} s",
                    fix="see if its process is stopped or starved; HOROVOD_GLOO_TIMEOUT_SECONDS sets a longer wait",
                )
                raise HorovodInternalError(str(error))


def open_slots(
    store: Any, *, ranks: Sequence[int], index: int, check: Callable[[], None], timeout_seconds: float
) -> SharedSlots | None:
    """Map the slots of these ranks of one host, which open them at the same store. Returns None without such memory.

    Raises HorovodInternalError if the first rank does not create the file within the timeout, or is gone.
    """
    size = len(ranks)
    count = size * (COUNTER_BYTES + 2 * HALF_BYTES)
    if index == 0:
        store.set("memory", create_shared_file(count))
    path = wait_for_key(store, "memory", check=check, timeout_seconds=timeout_seconds).decode()
    if not path:
        return None
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), count)
    if store.add("opened", 1) == size:  # all ranks have mapped the file: its name is no longer needed
        with suppress(OSError):
            os.unlink(path)
    return SharedSlots(memory, ranks, index)


def _view_half(memory: mmap.mmap, start: int) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8, count=HALF_BYTES, offset=start)


def _split_into_chunks(tensors: Sequence[torch.Tensor], max_count: int) -> list[list[torch.Tensor]]:
    """Flatten the tensors, and divide them into chunks of at most `max_count` values."""
    chunks: list[list[torch.Tensor]] = [[]]
    room = max_count
    for tensor in (one.detach().reshape(-1) for one in tensors):
        while len(tensor):
            if not room:
                chunks.append([])
                room = max_count
            chunks[-1].append(tensor[:room])
            tensor = tensor[len(chunks[-1][-1]) :]
            room -= len(chunks[-1][-1])
    return chunks


def _split_evenly(count: int, size: int) -> list[tuple[int, int]]:
    return [(count * rank // size, count * (rank + 1) // size) for rank in range(size)]


def _copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    if len(sources) == 1:
        targets[0].copy_(sources[0])
    else:
        torch._foreach_copy_(list(targets), list(sources))


def _copy_share(slot: torch.Tensor, start: int, end: int, chunk: Sequence[torch.Tensor]) -> None:
    """Copy one rank's share from its slot to the tensors of a chunk."""
    sources, targets, offset = [], [], 0
    for tensor in chunk:
        first, last = max(start, offset), min(end, offset + len(tensor))
        if first < last:
            sources.append(slot[first:last])
            targets.append(tensor[first - offset : last - offset])
        offset += len(tensor)
    if sources:
        _copy(sources, targets)

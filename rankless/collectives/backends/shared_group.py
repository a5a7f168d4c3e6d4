"""A group of processes of one host that share memory: everything that it holds, from its opening to its closing."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from rankless.collectives.backends.double_buffered_slots import Slots, count_slot_bytes
from rankless.collectives.backends.fused_reductions import FusedReductions
from rankless.collectives.backends.futex_signals import ControlLayout, Futex, GroupSignals
from rankless.collectives.backends.group_failure_errors import Membership, make_error
from rankless.collectives.backends.message_transfers import MessageRing, PointToPoint, RingLayout
from rankless.collectives.backends.operation_queue import OperationQueue
from rankless.collectives.backends.peer_liveness import PeerProcesses, ProcessIdentity
from rankless.collectives.backends.shared_copying_collectives import SharedMovement
from rankless.collectives.backends.shared_memory_mapping import SharedRegion, open_shared_region
from rankless.collectives.backends.shared_reductions import SharedReductions
from rankless.collectives.backends.store_exchange import StoreExchange, do_nothing
from rankless.collectives.shared_memory_file import host_identity
from rankless.config.shared_memory_support import Support, find_futex_number, is_supported
from rankless.records.group_failure_codes import FailureKind, encode_failure

_PAGE_BYTES = 4096
SEVERAL_HOSTS = Support("the ranks are on several hosts")
NO_MEMORY = Support("there is no memory that all ranks can map (no anonymous files, and /dev/shm is small or absent)")


class SharedGroup:
    """The shared memory of one group, and this process's part in it.

    Args:
        region: The group's memory.
        exchange: Connects the ranks when they allocate more.
        member: This process's place in the group.
        peers: The processes of the other ranks. `close` closes them.
    """

    def __init__(self, region: SharedRegion, exchange: StoreExchange, member: Membership, peers: PeerProcesses) -> None:
        size, layout = member.size, ControlLayout(member.size)
        rings = RingLayout(size)
        first_slot = _round_up(layout.byte_count)
        first_ring = first_slot + count_slot_bytes(size)
        self.signals = GroupSignals(
            region.view_words(0, layout.byte_count),
            region.address,
            layout,
            member=member,
            peers=peers,
            futex=Futex(find_futex_number() or 0),
        )
        slots = Slots(region.bytes[first_slot:first_ring], self.signals)
        ring_bytes = region.bytes[first_ring:][: rings.byte_count]
        ring_words = region.view_words(first_ring, first_ring + rings.byte_count)
        self.reductions = SharedReductions(slots)
        self.fused_reductions = FusedReductions(slots)
        self.movement = SharedMovement(slots)
        self.messages = PointToPoint(
            self.signals,
            lambda sender, receiver: MessageRing(ring_bytes, ring_words, rings, sender=sender, receiver=receiver),
        )
        signals, rank = self.signals, member.rank
        self.queue = OperationQueue(lambda: signals.end_group(FailureKind.INTERRUPTED, rank))
        self._exchange, self._member = exchange, member

    def allocate(
        self,
        count: int,
        dtype: torch.dtype,
        *,
        limit_bytes: int | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> torch.Tensor | None:
        """Return a tensor in memory that all ranks map. See `SharedMemoryProcessGroup.allocate`."""
        exchange = self._begin_allocation()
        tensors, stride = self.reductions.tensors, _round_up(max(1, count * dtype.itemsize))
        if limit_bytes is not None:
            # Ranks free memory at different times, so all must agree on whether there is enough.
            is_enough = tensors.reserved_bytes + stride <= limit_bytes
            if not all(exchange.gather("limit", "yes" if is_enough else "")):
                return None
        region = open_shared_region(exchange, stride * self._member.size)
        return None if region is None else tensors.add(region, count, dtype, on_close)

    def map_common(self, byte_count: int, terms: str) -> torch.Tensor | None:
        """Return bytes that are the same memory on all ranks. See `SharedMemoryProcessGroup.map_common`."""
        exchange = self._begin_allocation()
        if len(set(exchange.gather("terms", f"{byte_count} {terms}"))) > 1 or byte_count < 1:
            return None
        # Not in a file, which may be on a disk.
        region = open_shared_region(exchange, _round_up(byte_count), ("proc", "socket"))
        return None if region is None else region.bytes[:byte_count]

    def _begin_allocation(self) -> StoreExchange:
        """Return an exchange for memory that the ranks are about to map. All ranks call this in the same order."""
        self.signals.check()
        tensors = self.reductions.tensors
        tensors.allocations += 1
        exchange = self._exchange.derive(f"tensor {tensors.allocations}")

        def check() -> None:
            self.signals.check()
            self._exchange.check()

        exchange.check = check
        return exchange

    def abort(self) -> None:
        """End the group for all ranks: their waits raise at once."""
        self.signals.end_group(FailureKind.ABORTED, self._member.rank)

    def interrupt(self) -> None:
        """End the group for all ranks, because this one has raised an exception where others wait in it."""
        self.signals.end_group(FailureKind.LEFT, self._member.rank)

    def close(self) -> None:
        """Leave the group. Operations that are not done fail. The memory goes with the last reference to this.

        In a forked process this does nothing: the threads and locks of the group are the parent's.
        """
        if self.signals.is_forked:
            return
        self.signals.close()
        self.queue.close()
        self.reductions.tensors.close()
        self.messages.close()


def open_shared_group(
    store: Any, member: Membership, timeout: timedelta, *, objection: str = "", check: Callable[[], None] = do_nothing
) -> SharedGroup | Support:
    """Open a group of processes that share memory.

    Args:
        store: A `torch.distributed.Store` of the group's ranks, with keys that no earlier group has used.
        member: This process's place in the group.
        timeout: How long the ranks wait for each other.
        objection: Why this rank does not want such a group. Default: none.
        check: Called while waiting. It raises if the wait is in vain. Default: nothing.

    Returns:
        The group. On all ranks, why there is none, if they are on several hosts, a rank objects, a machine does not
        support it, or there is no memory.

    Raises:
        CollectiveError: A rank does not call this within the timeout, or its process has ended.
    """
    exchange = StoreExchange(store, "shared memory", rank=member.rank, size=member.size, timeout=timeout)
    exchange.check = check
    own = {
        "host": host_identity(),
        "objection": objection or is_supported().reason,
        **dataclasses.asdict(ProcessIdentity.own()),
    }
    others: list[dict[str, Any]] = [json.loads(text) for text in exchange.gather("process", json.dumps(own))]
    if any(other["host"] != own["host"] for other in others):
        return SEVERAL_HOSTS
    for rank, other in enumerate(others):
        if other["objection"]:
            return Support(f"rank {member.global_ranks[rank]}: {other['objection']}")
    identities = [ProcessIdentity(other["process_id"], other["start_ticks"]) for other in others]
    return _open_memory(exchange, member, identities)


def _open_memory(
    exchange: StoreExchange, member: Membership, identities: Sequence[ProcessIdentity]
) -> SharedGroup | Support:
    """Open the memory of a group, given the processes of all ranks."""
    peers = PeerProcesses({rank: one for rank, one in enumerate(identities) if rank != member.rank})

    check = exchange.check

    def require_peers() -> None:
        check()
        for rank in sorted(peers.find_ended()):
            raise make_error(encode_failure(FailureKind.ENDED, rank), member)

    exchange.check = require_peers
    size = member.size
    byte_count = _round_up(ControlLayout(size).byte_count) + count_slot_bytes(size) + RingLayout(size).byte_count
    region = None
    try:
        region = open_shared_region(exchange.derive("group"), byte_count)
    finally:
        if region is None:
            peers.close()
    return NO_MEMORY if region is None else SharedGroup(region, exchange, member, peers)


def _round_up(byte_count: int) -> int:
    return -(-byte_count // _PAGE_BYTES) * _PAGE_BYTES

"""Detect ranks that make different calls, or the same call with different values, without a message between them.

Note [desync detection]: every collective call of a script (a job's call, a pass over a loader, `save`, `once`, the end
of the script) is a sync point with a number. A rank writes its sync point into memory that all ranks of the host share,
then reads what the others have written under the same number. No rank waits: the rank that arrives later compares. If
two sync points differ, that rank raises before it enters a collective that no other rank is in. The rank that arrived
earlier may wait in a collective already, so it cannot complete its step. The agent ends it, or the collective fails
because the other process has ended, and then this rank raises the same error. The comparison costs microseconds; a
message per call would cost a round trip.

Hosts share no memory. Between them the first rank of each host compares: see Note [sync points between hosts]. It
writes a difference into the memory of its host, where the other ranks read it at their next sync point.
"""

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Container, Sequence

import msgspec

from rankless.collectives.byte_messages import all_gather_bytes, barrier
from rankless.collectives.shared_memory_file import create_shared_file, host_identity
from rankless.collectives.sync_point_connections import NUMBER, ErrorMessage, HostConnection, connect_hosts
from rankless.collectives.sync_point_encoding import (
    MAX_SYNC_POINT_BYTES,
    PostedSyncPoint,
    SyncPointNames,
    decode_sync_point,
    encode_compared,
    encode_explanation,
    make_divergence_error,
)
from rankless.errors import RanksDiverged
from rankless.parallel.mesh import DescribeDifference, Mesh, describe_nothing
from rankless.records.encoding import encode_msgpack
from rankless.user_code import caller_line

SLOTS = 64
"""Sync points of each rank that can be read. A rank that is further ahead than this is not compared."""
LENGTH = struct.Struct("<H")
ENTRY_BYTES = 4096
"""A number, a length, and a sync point."""
ERROR_BYTES = 8192
"""At the end of the memory: the length of an error that the first rank of the host has received, and the error."""
REREADS = 5
END_OF_SCRIPT = "the end of the script"

assert MAX_SYNC_POINT_BYTES + NUMBER.size + LENGTH.size <= ENTRY_BYTES


class DesyncDetector:
    """One rank's side of the comparison."""

    def __init__(self, mesh: Mesh, *, notify: Callable[[str], None]) -> None:
        self._mesh = mesh
        self._notify = notify
        self._memory: mmap.mmap | None = None
        self._local_ranks: Sequence[int] = ()
        self._hosts: HostComparison | None = None
        self._has_hosts = False
        self._opened = False
        self.number = 0
        """The number of the last sync point, equal on all ranks that wait for each other."""
        self._compared = b""
        self._known = SyncPointNames(names=tuple, describe=describe_nothing, line="")
        self._fence = threading.Lock()

    def check_sync_point(
        self,
        text: str,
        *,
        names: Callable[[], Sequence[str]] = tuple,
        digests: Sequence[int] = (),
        remark: str = "",
        details: bytes = b"",
        describe: DescribeDifference = describe_nothing,
    ) -> None:
        """Post this rank's sync point. Raise `RanksDiverged` if another rank has posted a different one.

        `text` names the sync point and must be equal on every rank. So must the `digests` of 64 bits, to which `names`
        returns the names. A `remark` and `details` are not compared; if digests differ, the error shows the remark and
        what `describe` makes of all ranks' details. The first call is collective.
        """
        self.open()
        if self._memory is None:
            return
        self.number += 1
        self._compared = encode_compared(text, digests)
        line = caller_line() if text != END_OF_SCRIPT else ""
        self._known = SyncPointNames(names=names, describe=describe, line=line)
        payload = self._compared + encode_explanation(line, remark, details)
        self._write(payload)
        if self._hosts is not None:
            self._hosts.post(self.number, payload, self._known)
        with self._fence:  # a full memory fence: other ranks see our entry before we read theirs
            pass
        self.check_again()

    def check_again(self) -> None:
        """Compare the last sync point with ranks that have arrived meanwhile. Raise `RanksDiverged` on a difference."""
        if self._memory is None or not self.number:
            return
        for rank in self._local_ranks:
            if rank != self._mesh.rank and not self._matches(rank):
                raise self._make_error()
        if self._has_hosts:
            self._raise_difference_of_hosts(None if self._hosts is None else self._hosts.find_difference())

    def have_reached(self, number: int, ranks: Container[int]) -> bool:
        """Return whether those of some ranks that are on this host have posted a sync point, or a later one."""
        memory = self._memory
        others = [rank for rank in self._local_ranks if rank != self._mesh.rank and rank in ranks]
        if memory is None:
            return True
        return all(NUMBER.unpack_from(memory, self._slot_offset(rank, number))[0] >= number for rank in others)

    def end(self) -> None:
        """Post the end of the script as a sync point, if this rank has had one before."""
        if self._memory is not None:
            self.check_sync_point(END_OF_SCRIPT)
        if self._hosts is not None:
            self._raise_difference_of_hosts(self._hosts.wait_at_end())
            self._hosts.close()

    def close(self) -> None:
        """Close the connections to other hosts, without a comparison."""
        hosts, self._hosts = self._hosts, None
        if hosts is not None:
            hosts.close()

    def open(self) -> None:
        """Share memory with the other ranks, unless that has been done. Collective."""
        if not self._opened:
            self._open()

    def _open(self) -> None:
        """Share memory: the first rank of each host creates a file, all its ranks map it, and it removes its name."""
        self._opened = True
        mesh = self._mesh
        identities = [data.decode() for data in all_gather_bytes(host_identity().encode(), mesh=mesh)]
        hosts = [[rank for rank, one in enumerate(identities) if one == each] for each in dict.fromkeys(identities)]
        self._local_ranks = next(ranks for ranks in hosts if mesh.rank in ranks)
        size = len(self._local_ranks) * SLOTS * ENTRY_BYTES + ERROR_BYTES
        path = create_shared_file(size) if mesh.rank == self._local_ranks[0] else ""
        try:
            paths = [data.decode() for data in all_gather_bytes(path.encode(), mesh=mesh)]
            if not all(paths[ranks[0]] for ranks in hosts):
                self._notify(
                    "cannot check that all ranks make the same calls in the same order: there is no shared memory"
                )
                return
            with open(paths[self._local_ranks[0]], "r+b") as file:
                self._memory = mmap.mmap(file.fileno(), size)
            barrier(mesh)
        finally:
            if path:
                os.unlink(path)
        if len(hosts) > 1:
            self._connect_hosts(hosts)

    def _connect_hosts(self, hosts: Sequence[Sequence[int]]) -> None:
        connections, failure = connect_hosts(self._mesh, hosts)
        if failure:
            self._notify(f"cannot check that the ranks of different hosts make the same calls: {failure}")
            return
        self._has_hosts = True
        if connections:
            self._hosts = HostComparison(connections, hosts, rank=self._mesh.rank)

    def _write(self, payload: bytes) -> None:
        memory = self._memory
        assert memory is not None
        at = self._slot_offset(self._mesh.rank, self.number)
        data = LENGTH.pack(len(payload)) + payload
        memory[at + NUMBER.size : at + NUMBER.size + len(data)] = data
        memory[at : at + NUMBER.size] = NUMBER.pack(self.number)

    def _matches(self, rank: int) -> bool:
        """Return whether a rank has posted the same sync point, has not arrived yet, or is too far ahead to compare."""
        memory, compared = self._memory, self._compared
        assert memory is not None
        at = self._slot_offset(rank, self.number)
        start = at + NUMBER.size + LENGTH.size
        for attempt in range(REREADS):
            if NUMBER.unpack_from(memory, at)[0] != self.number or memory[start : start + len(compared)] == compared:
                return True
            # A processor may show the number before the data that belongs to it.
            time.sleep(0.0002 * attempt)
        return False

    def _slot_offset(self, rank: int, number: int) -> int:
        return (self._local_ranks.index(rank) * SLOTS + number % SLOTS) * ENTRY_BYTES

    def _make_error(self) -> RanksDiverged:
        payloads = {rank: self._read_sync_point(rank) for rank in self._local_ranks}
        points = {rank: decode_sync_point(payload) for rank, payload in payloads.items() if payload is not None}
        return make_divergence_error(points, rank=self._mesh.rank, known=self._known)

    def _read_sync_point(self, rank: int) -> bytes | None:
        """Return what a rank has posted under this number; None if it has not arrived or is too far ahead."""
        memory = self._memory
        assert memory is not None
        at = self._slot_offset(rank, self.number)
        if NUMBER.unpack_from(memory, at)[0] != self.number:
            return None
        start = at + NUMBER.size + LENGTH.size
        return memory[start : start + LENGTH.unpack_from(memory, at + NUMBER.size)[0]]

    def _raise_difference_of_hosts(self, difference: ErrorMessage | None) -> None:
        """Raise a difference between hosts, and publish it to the ranks of this host."""
        memory = self._memory
        assert memory is not None
        at = len(memory) - ERROR_BYTES
        if difference is not None:
            data = encode_msgpack(difference)[: ERROR_BYTES - LENGTH.size]
            memory[at + LENGTH.size : at + LENGTH.size + len(data)] = data
            memory[at : at + LENGTH.size] = LENGTH.pack(len(data))
            raise difference.to_error()
        length = LENGTH.unpack_from(memory, at)[0]
        if length:
            data = memory[at + LENGTH.size : at + LENGTH.size + length]
            raise msgspec.msgpack.decode(data, type=ErrorMessage).to_error()


MAX_UNCOMPARED = 256
"""Own sync points that rank 0 keeps for a host that lags. A host that lags more is not compared at older ones."""
END_SECONDS = 2.0
MAX_FIELD_CHARACTERS = 1000


class HostComparison:
    """One host's side of the comparison, in the first rank of the host."""

    def __init__(self, connections: Sequence[HostConnection], hosts: Sequence[Sequence[int]], *, rank: int) -> None:
        self._connections = connections
        self._hosts = hosts
        self._rank = rank
        self._posted: dict[int, tuple[bytes, SyncPointNames]] = {}
        self._compared = {each.host: 0 for each in connections}
        """The last number at which each host was compared."""
        self._number = 0

    def post(self, number: int, payload: bytes, known: SyncPointNames) -> None:
        """Send this host's sync point to rank 0, or keep it on rank 0."""
        self._number = number
        if self._rank != 0:
            self._connections[0].send(NUMBER.pack(number) + payload)
            return
        self._posted[number] = (payload, known)
        while len(self._posted) > MAX_UNCOMPARED:
            del self._posted[next(iter(self._posted))]

    def find_difference(self) -> ErrorMessage | None:
        """Return the error of the first difference that is known by now. Never waits."""
        for each in self._connections:
            each.receive()
        if self._rank != 0:
            arrived = self._connections[0].arrived
            return msgspec.msgpack.decode(arrived[0], type=ErrorMessage) if arrived else None
        for each in self._connections:
            while each.arrived and NUMBER.unpack_from(each.arrived[0])[0] <= self._number:
                message = each.arrived.popleft()
                self._compared[each.host] = number = NUMBER.unpack_from(message)[0]
                difference = self._compare(number, message[NUMBER.size :], each.host)
                if difference is not None:
                    self._broadcast(difference)
                    return difference
        self._forget_compared()
        return None

    def wait_at_end(self) -> ErrorMessage | None:
        """Return the error of a difference that arrives soon after the last sync point, on rank 0."""
        deadline = time.monotonic() + END_SECONDS
        while (difference := self.find_difference()) is None:
            if self._rank != 0 or not self._posted or time.monotonic() > deadline:
                break
            time.sleep(0.001)
        return difference

    def close(self) -> None:
        """Close the connections."""
        for each in self._connections:
            each.close()

    def _compare(self, number: int, payload: bytes, host: int) -> ErrorMessage | None:
        own = self._posted.get(number)
        if own is None:
            return None
        point, known = decode_sync_point(own[0]), own[1]
        if payload.startswith(point.compared):
            return None
        points: dict[int, PostedSyncPoint] = dict.fromkeys(self._hosts[0], point)
        points |= dict.fromkeys(self._hosts[host], decode_sync_point(payload))
        error = make_divergence_error(points, rank=self._rank, known=known)
        expected, found = str(error.expected)[:MAX_FIELD_CHARACTERS], str(error.found)[:MAX_FIELD_CHARACTERS]
        return ErrorMessage(expected=expected, found=found, fix=error.fix, where=error.where)

    def _broadcast(self, difference: ErrorMessage) -> None:
        data = encode_msgpack(difference)
        for each in self._connections:
            each.send(data)

    def _forget_compared(self) -> None:
        """Drop the sync points at which every connected host was compared."""
        last = min((self._compared[each.host] for each in self._connections if each.is_open), default=self._number)
        while self._posted and (first := next(iter(self._posted))) <= last:
            del self._posted[first]

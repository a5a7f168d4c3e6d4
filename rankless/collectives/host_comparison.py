"""Compares the sync points of hosts that share no memory. See Note [sync points between hosts]."""

import time
from collections.abc import Sequence

import msgspec

from rankless.collectives.host_connections import NUMBER, ErrorMessage, HostConnection
from rankless.collectives.sync_point import PostedSyncPoint, SyncPointNames, decode_sync_point, make_divergence_error
from rankless.records.encoding import encode_msgpack

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

"""A rank's access to the coordinator. Rank 0 calls it directly, the others send messages to rank 0. Nothing blocks.

Rank 0 detects stalled operations, which some ranks have submitted and others have not. It warns, or ends the job.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from selectors import EVENT_READ, BaseSelector
from typing import Protocol

import msgspec

from rankless.extensions.horovod.engine.connections import ConnectionClosed, RankConnection, close_gracefully
from rankless.extensions.horovod.engine.coordinator import Coordinator
from rankless.extensions.horovod.engine.coordinator_table import ScheduledBatch
from rankless.extensions.horovod.engine.messages import (
    CacheMiss,
    Execute,
    Leave,
    Refuse,
    RequestMetadata,
    StopRanks,
    Submit,
    SubmitCached,
    Wait,
    decode_coordinator_message,
    decode_rank_message,
    encode,
)
from rankless.extensions.horovod.engine.pending_operations import OperationId
from rankless.extensions.horovod.engine.timeline import Timeline

ReceivedBatch = tuple[Execute, bytes]
"""A batch to execute, and the values of its inline operations."""


DEADLOCK_SECONDS = 0.5
"""How long ranks have reported to wait for each other before they get an error."""


CHECK_SECONDS = 1.0


def print_to_stderr(text: str) -> None:
    """Print a line to standard error."""
    print(text, file=sys.stderr, flush=True)


class StallDetector:
    """Checks every second for stalled operations.

    Args:
        warn_seconds: Warn after this time, and again every time it has passed. 0 never warns.
        shutdown_seconds: End the job after this time. 0 never ends it.
        warn: Receives the warnings. The default prints them to standard error.
    """

    def __init__(
        self, *, warn_seconds: float, shutdown_seconds: float, warn: Callable[[str], None] = print_to_stderr
    ) -> None:
        self._warn_seconds = warn_seconds
        self._shutdown_seconds = shutdown_seconds
        self._warn = warn
        self._last_check = 0.0
        self._last_warning = 0.0

    def check(self, coordinator: Coordinator, now: float) -> str | None:
        """Warn about stalled operations. Returns the reason to end the job if they have stalled for too long."""
        if not self._warn_seconds or now - self._last_check < min(CHECK_SECONDS, self._warn_seconds):
            return None
        self._last_check = now
        if now - self._last_warning >= self._warn_seconds:
            missing = coordinator.find_missing_ranks(before=now - self._warn_seconds)
            if missing:
                self._last_warning = now
                self._warn(_format_warning(missing, self._warn_seconds))
        if self._shutdown_seconds:
            missing = coordinator.find_missing_ranks(before=now - self._shutdown_seconds)
            if missing:
                return f"Stalled for more than {self._shutdown_seconds:g} seconds.{_format_missing(missing)}"
        return None


def _format_warning(missing: dict[int, list[str]], seconds: float) -> str:
    return (
        "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are waiting "
        f"for remainder of ranks for more than {seconds:g} seconds. This may indicate that different ranks are trying "
        "to submit different tensors or that only subset of ranks is submitting tensors, which will cause deadlock. "
        + _format_missing(missing)
    )


def _format_missing(missing: dict[int, list[str]]) -> str:
    lines = [f"{rank}: [{', '.join(sorted(keys))}]" for rank, keys in missing.items()]
    return "\nMissing ranks:\n" + "\n".join(lines)


class ShutdownReceived(Exception):
    """A rank has shut down or is gone: nothing more is executed."""


class CoordinatorClient(Protocol):
    """One rank's access to the coordinator."""

    @property
    def is_holding(self) -> bool:
        """Whether operations are ready, and wait for the next cycle."""
        ...

    def submit(self, operation_id: OperationId, request: RequestMetadata, values: bytes) -> None:
        """Submit an operation. The next `receive` sends it, together with others submitted before."""
        ...

    def refuse(self, set_id: int, keys: Sequence[str], reason: str) -> None:
        """Refuse operations that other ranks may submit. The next `receive` sends it."""
        ...

    def wait(self, operation_ids: Sequence[OperationId]) -> None:
        """Report that this rank submits nothing before these operations have ended. The next `receive` sends it."""
        ...

    def receive(self, *, is_idle: bool) -> Iterator[ReceivedBatch]:
        """Yield the batches scheduled since the last call. Raises ShutdownReceived after the last one."""
        ...

    def poll_seconds(self) -> float:
        """Return how long to wait at most before the next call of `receive`."""
        ...

    def leave(self) -> None:
        """Notify the other ranks that this rank shuts down, and close the connections."""
        ...


class RemoteCoordinatorClient:
    """The client of every rank but 0."""

    is_holding = False

    def __init__(self, connection: RankConnection, selector: BaseSelector, *, capacity: int) -> None:
        self._connection = connection
        self._capacity = capacity
        self._cache_ids: dict[OperationId, tuple[int, RequestMetadata]] = {}
        self._submitted: dict[OperationId, tuple[RequestMetadata, bytes, int]] = {}
        """Pending requests with their values, and the cache id under which they were submitted, or -1."""
        self._submitted_cached: dict[int, OperationId] = {}
        """Pending requests by cache id: `_cache_ids` may have dropped them since."""
        self._selector = selector
        self._is_closed = False
        selector.register(connection, EVENT_READ)

    def submit(self, operation_id: OperationId, request: RequestMetadata, values: bytes) -> None:
        """Submit an operation: by its cache id if it is cached."""
        cache_id, cached_request = self._cache_ids.get(operation_id, (-1, None))
        if cached_request == request:
            self._submitted_cached[cache_id] = operation_id
        else:
            cache_id = -1
        self._submitted[operation_id] = (request, values, cache_id)
        self._connection.enqueue(encode(Submit(request) if cache_id < 0 else SubmitCached(cache_id)), (values,))

    def refuse(self, set_id: int, keys: Sequence[str], reason: str) -> None:
        """Refuse operations that other ranks may submit."""
        self._connection.enqueue(encode(Refuse(set_id, tuple(keys), reason)))

    def wait(self, operation_ids: Sequence[OperationId]) -> None:
        """Report that this rank submits nothing before these operations have ended."""
        self._connection.enqueue(encode(Wait(tuple(operation_ids))))

    def receive(self, *, is_idle: bool) -> Iterator[ReceivedBatch]:  # noqa: ARG002  # the protocol's
        """Yield the batches scheduled since the last call. Raises ShutdownReceived after the last one."""
        # Messages that arrived before the connection closed can still be read, and may give the reason.
        with suppress(ConnectionClosed):
            self._connection.flush()
        try:
            for data, values in self._connection.receive():
                message = decode_coordinator_message(data)
                if isinstance(message, Execute):
                    self._update_cache_ids(message)
                    yield message, values
                elif isinstance(message, CacheMiss):
                    self._resubmit(message.cache_id)
                elif isinstance(message, StopRanks):
                    self._close()  # rank 0 waits for this, so that its last message is not lost
                    raise ShutdownReceived(message.reason)
        except ConnectionClosed:
            raise ShutdownReceived("Rank 0 is gone.") from None

    def poll_seconds(self) -> float:
        """Return how long to wait at most before the next call of `receive`."""
        return 0.001 if self._connection.has_more_to_send else 1.0

    def leave(self) -> None:
        """Notify rank 0 that this rank shuts down, and close the connection."""
        with suppress(ConnectionClosed):
            self._connection.send(encode(Leave()))
        self._close()

    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._selector.unregister(self._connection)
            close_gracefully([self._connection])

    def _update_cache_ids(self, message: Execute) -> None:
        for item in message.items:
            operation_id = (message.set_id, item.key)
            request, _, cache_id = self._submitted.pop(operation_id, (None, b"", -1))
            self._submitted_cached.pop(cache_id, None)
            if item.error:
                self._cache_ids.pop(operation_id, None)
            elif item.cache_id >= 0 and request is not None:
                self._cache_ids.pop(operation_id, None)
                self._cache_ids[operation_id] = (item.cache_id, request)
                if len(self._cache_ids) > 2 * self._capacity:
                    del self._cache_ids[next(iter(self._cache_ids))]

    def _resubmit(self, cache_id: int) -> None:
        """Submit in full an operation whose cache id the coordinator has evicted."""
        operation_id = self._submitted_cached.pop(cache_id, None)
        if operation_id is None:
            raise ShutdownReceived(f"Rank 0 asks for cache id {cache_id}, which this rank has not submitted.")
        self._cache_ids.pop(operation_id, None)
        request, values, _ = self._submitted[operation_id]
        with suppress(ConnectionClosed):
            self._connection.send(encode(Submit(request)), (values,))


class LocalCoordinatorClient:
    """The client of rank 0, which also serves the coordinator to the other ranks."""

    def __init__(
        self,
        connections: Mapping[int, RankConnection],
        selector: BaseSelector,
        *,
        coordinator: Coordinator,
        timeline: Timeline,
        stall_detector: StallDetector,
        cycle_seconds: float,
    ) -> None:
        self._connections = dict(connections)
        self._closing: list[RankConnection] = []
        """Connections on which `StopRanks` was sent, and whose other sides may not have read it yet."""
        self._coordinator = coordinator
        self._timeline = timeline
        self._stall_detector = stall_detector
        self._cycle_seconds = cycle_seconds
        self._last_batch_time = 0.0
        self._selector = selector
        for rank, connection in connections.items():
            selector.register(connection, EVENT_READ, rank)

    def submit(self, operation_id: OperationId, request: RequestMetadata, values: bytes) -> None:  # noqa: ARG002  # the protocol's
        """Submit an operation."""
        self._coordinator.submit(0, request, values, time.monotonic())

    def refuse(self, set_id: int, keys: Sequence[str], reason: str) -> None:
        """Refuse operations that other ranks may submit."""
        for key in keys:
            self._coordinator.refuse(0, (set_id, key), reason, time.monotonic())

    def wait(self, operation_ids: Sequence[OperationId]) -> None:
        """Report that this rank submits nothing before these operations have ended."""
        self._coordinator.wait(0, operation_ids, time.monotonic())

    def receive(self, *, is_idle: bool) -> Iterator[ReceivedBatch]:
        """Yield the batches scheduled since the last call. Raises ShutdownReceived after the last one."""
        for rank in [key.data for key, _ in self._selector.select(0)] if self._connections else ():
            self._receive_from(rank)
        now = time.monotonic()
        self._coordinator.break_deadlock(before=now - DEADLOCK_SECONDS)
        is_waiting = self._cycle_seconds and now - self._last_batch_time < self._cycle_seconds
        for batch in () if is_waiting else self._coordinator.schedule(is_idle=is_idle):
            self._last_batch_time = now
            self._timeline.mark_cycle()
            yield from self._send_batch(batch)
        for connection in self._connections.values():
            if connection.has_more_to_send:
                self._flush(connection)
        if (reason := self._stall_detector.check(self._coordinator, now)) is not None:
            self._end(reason)

    def poll_seconds(self) -> float:
        """Return how long to wait at most before the next call of `receive`."""
        if any(connection.has_more_to_send for connection in self._connections.values()):
            return 0.001
        if self.is_holding:
            return min(1.0, max(0.0, self._last_batch_time + self._cycle_seconds - time.monotonic()))
        return 1.0

    @property
    def is_holding(self) -> bool:
        """Whether operations are ready, and wait for the next cycle."""
        return self._cycle_seconds > 0 and self._coordinator.has_ready

    def leave(self) -> None:
        """Notify the other ranks that this rank shuts down, and close the connections."""
        self._send_shutdown("")
        close_gracefully(self._closing)
        self._closing = []

    def _receive_from(self, rank: int) -> None:
        connection = self._connections[rank]
        try:
            for data, values in connection.receive():
                message = decode_rank_message(data)
                if isinstance(message, Submit):
                    self._coordinator.submit(rank, message.request, values, time.monotonic())
                elif isinstance(message, SubmitCached):
                    now = time.monotonic()
                    if not self._coordinator.submit_cached(rank, message.cache_id, values, now):
                        connection.send(encode(CacheMiss(message.cache_id)))
                elif isinstance(message, Refuse):
                    for key in message.keys:
                        self._coordinator.refuse(rank, (message.set_id, key), message.reason, time.monotonic())
                elif isinstance(message, Wait):
                    self._coordinator.wait(rank, message.operation_ids, time.monotonic())
                elif isinstance(message, Leave):
                    self._end("", excluded=rank)
        except ConnectionClosed:
            self._end(f"Rank {rank} is gone.", excluded=rank)
        except msgspec.DecodeError as error:
            self._end(f"Rank {rank} sent something that is no message: {error}.")

    def _send_batch(self, batch: ScheduledBatch) -> Iterator[ReceivedBatch]:
        """Send a batch to the other ranks of its process set, and yield rank 0's own message if it is one of them."""
        values = b"".join(batch.values)
        shared = encode(batch.make_message(0)) if batch.is_same_for_all else None
        for rank in batch.recipients:
            if rank:
                self._send(rank, shared or encode(batch.make_message(rank)), values)
        if 0 in batch.recipients:
            yield batch.make_message(0), values

    def _send(self, rank: int, message: bytes, values: bytes) -> None:
        try:
            self._connections[rank].send(message, (values,))
        except ConnectionClosed:
            self._end(f"Rank {rank} is gone.", excluded=rank)

    def _flush(self, connection: RankConnection) -> None:
        try:
            connection.flush()
        except ConnectionClosed:
            rank = next(rank for rank, other in self._connections.items() if other is connection)
            self._end(f"Rank {rank} is gone.", excluded=rank)

    def _end(self, reason: str, *, excluded: int | None = None) -> None:
        self._send_shutdown(reason, excluded=excluded)
        raise ShutdownReceived(reason)

    def _send_shutdown(self, reason: str, *, excluded: int | None = None) -> None:
        for rank, connection in self._connections.items():
            if rank != excluded:
                with suppress(ConnectionClosed):
                    connection.send(encode(StopRanks(reason)))
        for rank, connection in self._connections.items():
            self._selector.unregister(connection)
            if rank == excluded:
                connection.close()
            else:
                connection.shut_down_sending()
                self._closing.append(connection)
        self._connections = {}

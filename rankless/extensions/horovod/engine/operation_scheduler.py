"""Schedules one rank's operations: takes requests, has rank 0 order them, executes the batches, and returns results."""

import itertools
import selectors
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from rankless.collectives.value_encoding import view_bytes
from rankless.extensions.horovod.engine.backends import DTYPES, ScaledReduction
from rankless.extensions.horovod.engine.coordinator import ALL_RANKS, TENSOR_KINDS, Coordinator, round_fusion_threshold
from rankless.extensions.horovod.engine.coordinator_client import (
    CoordinatorClient,
    LocalCoordinatorClient,
    RemoteCoordinatorClient,
    ShutdownReceived,
    StallDetector,
)
from rankless.extensions.horovod.engine.execution import ExecutionContext, OperationExecutor
from rankless.extensions.horovod.engine.messages import Execute, RequestMetadata
from rankless.extensions.horovod.engine.pending_operations import (
    PendingOperation,
    PendingOperations,
    get_operation_id,
    get_ready_events,
    record_event,
)
from rankless.extensions.horovod.engine.progress_loop import ProgressLoop
from rankless.extensions.horovod.engine.rendezvous import ConnectedRanks
from rankless.extensions.horovod.engine.requests import (
    UNNAMED_PREFIX,
    EngineRequest,
    OperationKind,
    ReduceOpCode,
    make_metadata,
    parse_operation_kind,
)
from rankless.extensions.horovod.engine.timeline import Timeline
from rankless.extensions.horovod.exceptions import HorovodInternalError
from rankless.extensions.horovod.settings import Settings

SHUT_DOWN = (
    "Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to allreduce, "
    "allgather or broadcast a tensor after one of the ranks finished execution. If the shutdown was caused by an "
    "exception, you should see the exception in the log before the first shutdown message."
)
TENSOR_OPERATION_KINDS = tuple(map(OperationKind, TENSOR_KINDS))
FINISH_SECONDS = 5.0
"""After a rank has left: how long the other ranks may still execute the batches scheduled before."""
WAIT_REPORT_SECONDS = 0.25
"""How long a thread waits for a result before it reports that to rank 0."""
THREADED_WAIT_REPORT_SECONDS = 10.0
"""The same if other threads of the script are alive: one of them might submit its first operation."""
HANDOFF_SECONDS = 1e-4
"""How long the background thread leaves a new request to its thread, which usually waits for the result at once."""


class OperationScheduler:
    """The operations of one rank, from joining the job to leaving it."""

    def __init__(self, connected: ConnectedRanks, *, rank: int, store: Any, settings: Settings) -> None:
        size = len(connected.hosts)
        self.timeline = Timeline()
        self.process_sets: dict[int, tuple[int, ...]] = {ALL_RANKS: tuple(range(size))}
        self._size = size
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._pending = PendingOperations(settings.outstanding_seconds)
        self._queue: deque[Execute] = deque()
        self._executing: Execute | None = None
        self._finish_deadline = 0.0
        self._handles = itertools.count(1)
        self._unnamed_counts: dict[int, int] = {}
        self._join_count = 0
        self._threads: set[int] = set()
        """The threads that have submitted operations."""
        self._error: HorovodInternalError | None = None
        self._is_closed = False
        connections = selectors.EpollSelector()
        self._client = self._make_client(connected, rank, connections, settings)
        self._progress = ProgressLoop(
            connections,
            step=self._step,
            has_work=lambda: bool(self._queue or self._pending),
            poll_seconds=self._client.poll_seconds,
            on_waiting=self._report_waiting,
            changed=self._changed,
        )
        self._executor = OperationExecutor(
            ExecutionContext(
                rank=rank,
                hosts=connected.hosts,
                store=store,
                timeout=timedelta(seconds=settings.timeout_seconds),
                check=self._check,
                find_cause=self._find_cause,
                activity=self.timeline.activity,
                reduces_by_hosts=settings.reduces_by_hosts,
            )
        )
        self._progress.start()

    def new_handle(self) -> int:
        """Return the number of this rank's next call."""
        return next(self._handles)

    def new_name(self, set_id: int) -> str:
        """Return a name for an unnamed operation.

        Ranks that call unnamed operations of a process set in the same order get the same names. The end of a join
        restarts the count, because the ranks have called different numbers of operations before it.
        """
        with self._lock:
            count = self._unnamed_counts[set_id] = self._unnamed_counts.get(set_id, 0) + 1
            return f"{UNNAMED_PREFIX}{self._join_count}.{count}" if self._join_count else f"{UNNAMED_PREFIX}{count}"

    def submit(self, handle: int, requests: Sequence[EngineRequest]) -> None:
        """Submit requests under one handle.

        Raises ValueError if one of their names is in use, and HorovodInternalError after the shutdown.
        """
        with self._lock:
            if self._error is not None:
                raise HorovodInternalError(*self._error.args)
            self._threads.add(threading.get_ident())
            try:
                operation = self._pending.add(handle, requests)
            except ValueError as error:
                self.refuse(requests[0].set_id, [get_operation_id(one)[1] for one in requests], str(error))
                raise
            operation.event = record_event(requests)
            is_group_inline = bool(requests[0].group) and fits_inline(requests, self._size)
            for one in requests:
                # A request outside a group decides for itself: other ranks may submit it together with others.
                is_inline = is_group_inline if one.group else fits_inline([one], self._size)
                operation_id = get_operation_id(one)
                values = tensor_to_bytes(one.tensor) if is_inline and one.tensor is not None else b""
                self._client.submit(operation_id, make_metadata(one, operation_id[1], is_inline), values)
            self._receive()
            if operation.is_done:
                return
            if self._queue or not self._progress.is_listening:
                self._progress.wake(HANDOFF_SECONDS)
            elif self._client.is_holding:
                self._progress.wake(self._client.poll_seconds())

    def refuse(self, set_id: int, keys: Sequence[str], reason: str) -> None:
        """Let the other ranks' operations with these keys fail, because this rank's call has raised an error."""
        with self._lock:
            if self._error is None and self._size > 1:
                self._client.refuse(set_id, sorted(set(keys)), reason)
                self._receive()
                if self._client.is_holding:
                    self._progress.wake(self._client.poll_seconds())

    def has_handle(self, handle: int) -> bool:
        """Whether a handle was submitted and its results were not returned yet."""
        return handle in self._pending

    def poll(self, handle: int) -> bool:
        """Whether an operation is outstanding no more: it has its result, or its error. Raises KeyError.

        Note [outstanding] in `pending_operations` says when.
        """
        operation = self._pending[handle]
        if not operation.is_done:
            with self._lock:
                self._receive()
                if self._queue:
                    self._progress.wake()
        return not self._pending.is_outstanding(operation)

    def synchronize(self, handle: int) -> list[Any]:
        """Wait for the results of a handle's requests, return them in order, and forget the handle.

        Raises KeyError for an unknown handle, and HorovodInternalError if the operation failed.
        """
        operation = self._pending[handle]
        try:
            self._progress.run_until_done(operation)
        finally:
            if operation.reported_at and not operation.is_done:  # an interrupt
                with self._lock:
                    self._client.wait(())
        with self._lock:
            self._pending.pop(handle)
        if operation.error is not None:
            raise operation.error
        if operation.event is not None:
            torch.cuda.current_stream().wait_event(operation.event)
        return [operation.results[get_operation_id(one)[1]] for one in operation.requests]

    def discard(self, handle: int) -> None:
        """Forget a handle whose results the script does not want any more. Does nothing for an unknown one."""
        with self._lock:
            if handle in self._pending:
                self._pending.pop(handle)

    def abort(self, reason: str) -> None:
        """Fail all pending operations, because other ranks will not take part in them."""
        with self._lock:
            if not self._is_closed:
                self._finish_deadline = 0.0
                self._end(reason)
                self._progress.wake()

    def close(self) -> None:
        """Leave the job, and notify the other ranks: their operations with this rank fail."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._progress.stop()
            self._client.leave()
            if self._error is None:
                self._end("This rank has left.")
        self._progress.wake()
        self._executor.close(is_stuck=self._executing is not None)
        self._progress.close()
        self.timeline.stop()
        self._progress.close_files()

    def _make_client(
        self, connected: ConnectedRanks, rank: int, selector: selectors.BaseSelector, settings: Settings
    ) -> CoordinatorClient:
        if rank:
            return RemoteCoordinatorClient(connected.connections[0], selector, capacity=settings.cache_capacity)
        coordinator = Coordinator(
            self._size,
            combine=combine,
            capacity=settings.cache_capacity,
            fusion_bytes=round_fusion_threshold(settings.fusion_bytes, connected.hosts.count(connected.hosts[0])),
            splits_groups=settings.splits_groups,
            timeline=self.timeline,
        )
        return LocalCoordinatorClient(
            connected.connections,
            selector,
            coordinator=coordinator,
            timeline=self.timeline,
            stall_detector=StallDetector(
                warn_seconds=settings.stall_seconds, shutdown_seconds=settings.stall_shutdown_seconds
            ),
            cycle_seconds=settings.cycle_seconds,
        )

    def _step(self) -> bool:
        """Receive messages, execute one batch, and return whether there was one."""
        with self._lock:
            self._receive()
            if not self._queue:
                return False
            execute = self._queue.popleft()
            self._executing = execute
            found = [self._pending.get((execute.set_id, item.key)) for item in execute.items]
        requests = {one.request.key: one.request for one in found if one is not None}
        operations = {id(one.operation): one.operation for one in found if one is not None}.values()
        keys = [item.key for item in execute.items]
        self.timeline.end_queue(keys)
        try:
            results: Mapping[str, Any] = self._execute(execute, requests, list(operations))
        except HorovodInternalError as error:
            results = dict.fromkeys(keys, error)
        self.timeline.end_execution(keys)
        with self._changed:
            self._executing = None
            for key, result in results.items():
                self._pending.finish((execute.set_id, key), result)
            self._changed.notify_all()
        return True

    def _execute(
        self, execute: Execute, requests: Mapping[str, EngineRequest], operations: Sequence[PendingOperation]
    ) -> dict[str, Any]:
        events = [operation.event for operation in operations if operation.event is not None]
        for event in events:
            torch.cuda.current_stream().wait_event(event)
        if events and self.timeline.is_on:
            self.timeline.wait_for_data(get_ready_events(execute, operations))
        results = self._executor.run(execute, self.process_sets[execute.set_id], requests)
        if events:
            done = torch.cuda.current_stream().record_event()
            for operation in operations:
                operation.event = done
        return results

    def _receive(self) -> None:
        """Receive the batches that rank 0 has scheduled. The lock is held."""
        if self._error is not None:
            return
        try:
            for execute, values in self._client.receive(is_idle=not self._queue and self._executing is None):
                self._deliver(execute, values)
        except ShutdownReceived as shutdown:
            self._end(str(shutdown)) if str(shutdown) else self._end_in_order()

    def _deliver(self, execute: Execute, values: bytes) -> None:
        """Store the results that arrived with the message, and queue the operations that must be executed."""
        offset = 0
        has_transfers = False
        for item in execute.items:
            operation_id = (execute.set_id, item.key)
            kind = parse_operation_kind(item.key)
            if not item.error:
                is_queued = not item.is_inline and kind in TENSOR_OPERATION_KINDS
                self.timeline.begin_execution(item.key, kind.value, is_queued=is_queued)
            if item.error:
                self._pending.finish(operation_id, HorovodInternalError(item.error))
            elif item.is_inline:
                pending = self._pending.get(operation_id)
                output = pending.request.output if pending is not None else None
                if output is not None:
                    count = output.numel() * output.element_size()
                    write_bytes(memoryview(values)[offset : offset + count], output)
                    offset += count
                self._pending.finish(operation_id, output)
            elif kind not in TENSOR_OPERATION_KINDS:
                if kind is OperationKind.JOIN:
                    self._join_count += 1
                    self._unnamed_counts.clear()
                self._update_process_sets(kind, item.details, item.request)
                self._pending.finish(operation_id, item.details[0] if item.details else None)
            else:
                has_transfers = True
        if has_transfers:
            self._queue.append(execute)
        self._changed.notify_all()

    def _report_waiting(self, operation: PendingOperation) -> None:
        """Report to rank 0 that this rank waits, if it has waited for a while and no other thread submits."""
        now = time.monotonic()
        operation.waiting_since = operation.waiting_since or now
        if now - max(operation.waiting_since, operation.reported_at) < WAIT_REPORT_SECONDS or operation.is_done:
            return
        own = threading.get_ident()
        others = [one for one in threading.enumerate() if one.ident != own and not one.name.startswith("rankless")]
        if others and now - operation.waiting_since < THREADED_WAIT_REPORT_SECONDS:
            return
        if not any(one.ident in self._threads for one in others):
            with self._lock:
                operation.reported_at = now
                self._client.wait([get_operation_id(one) for one in operation.requests])

    def _update_process_sets(
        self, kind: OperationKind, details: tuple[int, ...], request: RequestMetadata | None
    ) -> None:
        if kind is OperationKind.ADD_SET and request is not None:
            self.process_sets[details[0]] = request.ranks
        elif kind is OperationKind.REMOVE_SET:
            self.process_sets.pop(details[0], None)
            self._executor.forget(details[0])

    def _end(self, reason: str) -> None:
        """Execute nothing more, and fail all pending operations. The lock is held."""
        self._error = HorovodInternalError(f"{SHUT_DOWN} {reason}")
        self._queue.clear()
        self._pending.fail_all(self._error)
        self._changed.notify_all()

    def _end_in_order(self) -> None:
        """Fail pending operations except those already scheduled: a rank has left in order. The lock is held."""
        self._error = HorovodInternalError(SHUT_DOWN)
        self._finish_deadline = time.monotonic() + FINISH_SECONDS
        batches = [*self._queue, *([self._executing] if self._executing is not None else [])]
        scheduled = {(batch.set_id, item.key) for batch in batches for item in batch.items}
        self._pending.fail_all(self._error, excluded=scheduled)
        self._changed.notify_all()

    def _find_cause(self, failure: str) -> HorovodInternalError | None:
        """Return why nothing more is executed, or None. Called with the failure of an operation."""
        with self._lock:
            self._receive()
            if self._error is None or not self._finish_deadline:
                return self._error
            return HorovodInternalError(f"{SHUT_DOWN} {failure}")  # a rank has left in order, perhaps because it failed

    def _check(self) -> None:
        """Raise HorovodInternalError after the shutdown. Called while a batch waits for other ranks."""
        with self._lock:
            self._receive()
            if self._error is not None and time.monotonic() > self._finish_deadline:
                raise HorovodInternalError(*self._error.args)


MAX_BYTES = 1 << 16
MAX_TOTAL_BYTES = 1 << 18
"""How many bytes rank 0 receives from all ranks, and sends to them, for one operation at most."""


def fits_inline(requests: Sequence[EngineRequest], size: int) -> bool:
    """Whether the values of these requests are sent inline: one request outside a group, or all of a group."""
    if size == 1 or any(not _can_be_inline(request) for request in requests):
        return False
    count = sum(one.tensor.numel() * one.tensor.element_size() for one in requests if one.tensor is not None)
    return count <= min(MAX_BYTES, MAX_TOTAL_BYTES // size)


def _can_be_inline(request: EngineRequest) -> bool:
    return (
        request.kind is OperationKind.ALLREDUCE
        and request.allow_inline
        and request.tensor is not None
        and request.tensor.device.type == "cpu"
        and request.reduction is not ReduceOpCode.ADASUM
    )


def tensor_to_bytes(tensor: torch.Tensor) -> bytes:
    """Return the values of a contiguous tensor on the CPU."""
    if not tensor.numel():
        return b""
    return bytes(view_bytes(tensor).numpy())


def write_bytes(values: bytes | memoryview, output: torch.Tensor) -> None:
    """Copy values into a contiguous tensor on the CPU."""
    if output.numel():
        output.detach().reshape(-1).copy_(torch.frombuffer(bytearray(values), dtype=output.dtype))


def combine(request: RequestMetadata, values: Sequence[bytes], size: int) -> bytes:
    """Reduce the values in the given order, so that all ranks get the same bits.

    Ranks that have joined give no values, and count as zeros.
    """
    if not values[0]:
        return b""
    dtype = DTYPES[request.dtype]
    reduction = ScaledReduction(ReduceOpCode(request.reduction), request.prescale, request.postscale, size)
    tensors = [reduction.apply_prescale(torch.frombuffer(bytearray(one), dtype=dtype)) for one in values]
    if len(tensors) < size:
        tensors.append(torch.zeros_like(tensors[0]))
    total = tensors[0]
    for other in tensors[1:]:
        total = reduction.combine(total, other)
    return tensor_to_bytes(reduction.finish(total))

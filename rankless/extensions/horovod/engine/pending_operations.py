"""The operations whose results the script has not fetched yet: by handle, and by process set and key.

Note [outstanding]: scripts rely on what holds while an operation is outstanding: its name is in use, and `poll` returns
False. Horovod completes an operation in a cycle of its background thread, after every rank has submitted it. Here the
result of a small tensor often arrives earlier. So the operation stays outstanding until a cycle has passed since its
result, or until `synchronize` takes the result. A thread that waits in `synchronize` does not wait for the cycle.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rankless.extensions.horovod.engine.messages import Execute
from rankless.extensions.horovod.engine.requests import EngineRequest, OperationKind

DUPLICATE = (
    "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is currently "
    "being processed.  If you want to request another tensor, use a different tensor name."
)


@dataclass
class PendingOperation:
    """The requests that were submitted under one handle."""

    requests: tuple[EngineRequest, ...]
    results: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None
    is_fetched: bool = False
    """Whether the script has fetched the results, or does not want them any more."""
    event: torch.cuda.Event | None = None
    """Until execution: when the tensors are ready on their device. After it: when the results are."""
    waiting_since: float = 0.0
    """When a thread began to wait for it; 0 before that."""
    finished_at: float = 0.0
    """When its last result, or an error, arrived; 0 before that."""
    reported_at: float = 0.0
    """When rank 0 was told that this rank waits for it; 0 before that."""

    @property
    def is_done(self) -> bool:
        """Whether the results, or an error, have arrived."""
        return self.error is not None or len(self.results) == len(self.requests)


@dataclass(frozen=True)
class PendingRequest:
    """One request without a result."""

    operation: PendingOperation
    request: EngineRequest


OperationId = tuple[int, str]
"""A process set and a key: what identifies an operation on all ranks."""


class PendingOperations:
    """All pending operations of one rank.

    Args:
        outstanding_seconds: How long an operation stays outstanding after its result has arrived.
    """

    def __init__(self, outstanding_seconds: float) -> None:
        self._outstanding_seconds = outstanding_seconds
        self._operations: dict[int, PendingOperation] = {}
        self._requests: dict[OperationId, PendingRequest] = {}
        self._finished: dict[OperationId, tuple[float, PendingOperation]] = {}
        """Requests whose result arrived a short time ago and was not fetched, with its time, in that order."""

    def add(self, handle: int, requests: Sequence[EngineRequest]) -> PendingOperation:
        """Add requests under a handle. Raises ValueError if a name is being processed already."""
        ids = [get_operation_id(request) for request in requests]
        if self._finished:
            self._release_names()
        if len(set(ids)) < len(ids) or any(one in self._requests or one in self._finished for one in ids):
            raise ValueError(DUPLICATE)
        operation = self._operations[handle] = PendingOperation(tuple(requests))
        for operation_id, request in zip(ids, requests, strict=True):
            self._requests[operation_id] = PendingRequest(operation, request)
        return operation

    def __getitem__(self, handle: int) -> PendingOperation:
        return self._operations[handle]

    def __contains__(self, handle: int) -> bool:
        return handle in self._operations

    def __bool__(self) -> bool:
        return bool(self._requests)

    def get(self, operation_id: OperationId) -> PendingRequest | None:
        """Return this rank's request, or None if it has submitted none."""
        return self._requests.get(operation_id)

    def finish(self, operation_id: OperationId, result: Any) -> None:
        """Store a request's result or exception. Does nothing if this rank has not submitted the request."""
        pending = self._requests.pop(operation_id, None)
        if pending is None:
            return
        operation, now = pending.operation, time.monotonic()
        if isinstance(result, Exception):
            operation.error = result
        operation.results[operation_id[1]] = result
        if operation.is_done:
            operation.finished_at = operation.finished_at or now
        if not operation.is_fetched:
            self._finished[operation_id] = (now, operation)

    def is_outstanding(self, operation: PendingOperation) -> bool:
        """Whether the operation has no result, or has had one for less than a cycle."""
        return not operation.is_done or time.monotonic() - operation.finished_at < self._outstanding_seconds

    def fail_all(self, error: Exception, *, excluded: Collection[OperationId] = ()) -> None:
        """Finish all requests with an error, except the excluded ones."""
        for operation_id in [operation_id for operation_id in self._requests if operation_id not in excluded]:
            self.finish(operation_id, error)

    def pop(self, handle: int) -> PendingOperation:
        """Remove and return an operation. Its names are free once they have results. Raises KeyError."""
        operation = self._operations.pop(handle)
        operation.is_fetched = True
        for request in operation.requests:
            operation_id = get_operation_id(request)
            if (found := self._finished.get(operation_id)) is not None and found[1] is operation:
                del self._finished[operation_id]
        return operation

    def _release_names(self) -> None:
        """Free the names of results that have been there for a cycle."""
        end = time.monotonic() - self._outstanding_seconds
        for operation_id, (finished_at, _) in list(self._finished.items()):
            if finished_at > end:
                return
            del self._finished[operation_id]


def get_operation_id(request: EngineRequest) -> OperationId:
    """Return the id that the request has on all ranks."""
    if request.kind is OperationKind.BARRIER:
        return request.set_id, "barrier"
    if request.kind is OperationKind.JOIN:
        return 0, "join"
    if request.kind is OperationKind.ADD_SET:
        return 0, "add_process_set"
    if request.kind is OperationKind.REMOVE_SET:
        return 0, "remove_process_set"
    return request.set_id, request.key


def get_ready_events(execute: Execute, operations: Sequence[PendingOperation]) -> dict[str, torch.cuda.Event]:
    """Return, by key, the event after which a tensor of the batch is ready on its device."""
    keys = {item.key for item in execute.items}
    return {
        get_operation_id(one)[1]: operation.event
        for operation in operations
        for one in operation.requests
        if operation.event is not None and get_operation_id(one)[1] in keys
    }


def record_event(requests: Sequence[EngineRequest]) -> torch.cuda.Event | None:
    """Return an event after which the tensors on a GPU are ready, or None if none is there."""
    if any(one.tensor is not None and one.tensor.is_cuda for one in requests):
        event: torch.cuda.Event = torch.cuda.current_stream().record_event()
        return event
    return None

"""The operations whose results the script has not fetched yet: by handle, and by process set and key."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rankless.compat.horovod.engine.requests import OperationKind, OperationRequest

DUPLICATE = (
    "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is currently "
    "being processed.  If you want to request another tensor, use a different tensor name."
)


@dataclass
class PendingOperation:
    """The requests that were submitted under one handle."""

    requests: tuple[OperationRequest, ...]
    results: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None
    event: torch.cuda.Event | None = None
    """Until execution: when the tensors are ready on their device. After it: when the results are."""
    waiting_since: float = 0.0
    """When a thread began to wait for it; 0 before that."""
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
    request: OperationRequest


OperationId = tuple[int, str]
"""A process set and a key: what identifies an operation on all ranks."""


class PendingOperations:
    """All pending operations of one rank."""

    def __init__(self) -> None:
        self._operations: dict[int, PendingOperation] = {}
        self._requests: dict[OperationId, PendingRequest] = {}

    def add(self, handle: int, requests: Sequence[OperationRequest]) -> PendingOperation:
        """Add requests under a handle. Raises ValueError if a name is being processed already."""
        ids = [get_operation_id(request) for request in requests]
        if len(set(ids)) < len(ids) or any(operation_id in self._requests for operation_id in ids):
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
        if isinstance(result, Exception):
            pending.operation.error = result
        pending.operation.results[operation_id[1]] = result

    def fail_all(self, error: Exception, *, excluded: Collection[OperationId] = ()) -> None:
        """Finish all requests with an error, except the excluded ones."""
        for operation_id in [operation_id for operation_id in self._requests if operation_id not in excluded]:
            self.finish(operation_id, error)

    def pop(self, handle: int) -> PendingOperation:
        """Remove and return an operation."""
        return self._operations.pop(handle)


def get_operation_id(request: OperationRequest) -> OperationId:
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

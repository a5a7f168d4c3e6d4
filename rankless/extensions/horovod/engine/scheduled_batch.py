"""The batches that the coordinator schedules: operations that ranks execute as one, and each rank's message."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rankless.extensions.horovod.engine.coordinator_table import SubmittedOperation
from rankless.extensions.horovod.engine.messages import Execute, OperationResponse, RequestMetadata


@dataclass(frozen=True)
class ScheduledOperation:
    """An operation of a batch."""

    submitted: SubmittedOperation
    joined: tuple[int, ...]
    error: str
    cache_id: int = -1
    result: tuple[int, ...] = ()
    values: bytes = b""

    def make_response(self, rank: int, members: Sequence[int]) -> OperationResponse:
        """Return the response for one rank."""
        request = self.submitted.request
        return OperationResponse(
            key=self.submitted.key,
            cache_id=self.cache_id,
            error=self.error,
            details=self.result or _make_details(request, self.submitted.requests, rank, members),
            request=request if not self.error and (rank in self.joined or request.kind == "add_process_set") else None,
            is_inline=request.is_inline and not self.error,
        )


@dataclass(frozen=True)
class ScheduledBatch:
    """Operations that the ranks of a process set execute as one."""

    set_id: int
    members: tuple[int, ...]
    operations: tuple[ScheduledOperation, ...]

    @property
    def recipients(self) -> tuple[int, ...]:
        """The ranks that get a message. An error is for the ranks that have submitted the operation."""
        failed = [one.submitted for one in self.operations if one.error]
        if len(failed) < len(self.operations):
            return self.members
        return tuple(rank for rank in self.members if any(rank in one.requests for one in failed))

    @property
    def values(self) -> list[bytes]:
        """The results of the inline operations, in order."""
        return [one.values for one in self.operations if one.submitted.request.is_inline and not one.error]

    @property
    def is_same_for_all(self) -> bool:
        """Whether every rank gets the same message."""
        return not any(one.joined or one.submitted.request.kind == "alltoall" for one in self.operations)

    def make_message(self, rank: int) -> Execute:
        """Return the message for one rank."""
        return Execute(self.set_id, tuple(one.make_response(rank, self.members) for one in self.operations))


def _make_details(
    request: RequestMetadata, requests: Mapping[int, RequestMetadata], rank: int, members: Sequence[int]
) -> tuple[int, ...]:
    if len(requests) < len(members):
        return ()
    if request.kind == "allgather":
        return tuple(requests[member].shape[0] if requests[member].shape else 1 for member in members)
    if request.kind == "alltoall" and rank in members:
        index = members.index(rank)
        return tuple(requests[member].splits[index] for member in members)
    return ()

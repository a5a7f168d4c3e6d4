"""The operations that some ranks have submitted and others have not, and the batches in which they are executed.

Note [refusals]: a rank may refuse an operation that others submit: its name is in use there, or its arguments are
invalid. It raises at once, and says so to the coordinator. The ranks make their calls under one key in the same order,
so the refused call belongs to the first operation of the key that the rank has no part in yet. There the others get
the error. A call that every rank refuses needs no answer. A barrier, or the end of a join, forgets the calls that only
some ranks have made, and that they have all refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rankless.extensions.horovod.engine.messages import Execute, OperationResponse, RequestMetadata
from rankless.records.number_formatting import format_ranks


@dataclass(eq=False)
class SubmittedOperation:
    """An operation that some ranks have ready."""

    set_id: int
    key: str
    since: float
    requests: dict[int, RequestMetadata] = field(default_factory=dict)
    values: dict[int, bytes] = field(default_factory=dict)
    refusals: dict[int, str] = field(default_factory=dict)
    """Why ranks have refused it."""
    has_full_metadata: bool = False
    """Whether a rank has described it in full, and must learn its cache id."""

    @property
    def request(self) -> RequestMetadata:
        """One of the requests; the others agree with it."""
        return next(iter(self.requests.values()))

    def has_part(self, rank: int) -> bool:
        """Whether the rank has submitted or refused it."""
        return rank in self.requests or rank in self.refusals

    def find_missing(self, members: Sequence[int], joined: Mapping[int, None]) -> list[int]:
        """Return the ranks that it waits for."""
        return [rank for rank in members if not self.has_part(rank) and rank not in joined]

    def format_refusals(self) -> str:
        """Return which ranks have refused it and why, or an empty string."""
        ranks: dict[str, list[int]] = {}
        for rank, text in sorted(self.refusals.items()):
            ranks.setdefault(text, []).append(rank)
        return "; ".join(f"{self.key} was refused by {format_ranks(some)}: {text}" for text, some in ranks.items())


class SubmittedOperations:
    """The operations by process set and key. One key has several if a rank refuses a call before others submit it."""

    def __init__(self) -> None:
        self._by_id: dict[tuple[int, str], list[SubmittedOperation]] = {}

    def __iter__(self) -> Iterator[SubmittedOperation]:
        """Iterate over those that a rank has submitted. They may be removed meanwhile."""
        return (one for queue in list(self._by_id.values()) for one in list(queue) if one.requests)

    def get(self, operation_id: tuple[int, str], rank: int) -> SubmittedOperation | None:
        """Return the operation of that id which the rank has submitted, or None."""
        return next((one for one in self._by_id.get(operation_id, ()) if rank in one.requests), None)

    def get_or_create(self, set_id: int, key: str, rank: int, now: float) -> SubmittedOperation:
        """Return the first operation of the key in which the rank has no part."""
        queue = self._by_id.setdefault((set_id, key), [])
        for one in queue:
            if not one.has_part(rank):
                return one
        queue.append(SubmittedOperation(set_id, key, now))
        return queue[-1]

    def remove(self, submitted: SubmittedOperation) -> None:
        """Remove an operation."""
        queue = self._by_id[submitted.set_id, submitted.key]
        queue.remove(submitted)
        if not queue:
            del self._by_id[submitted.set_id, submitted.key]

    def forget_refused(self, set_id: int | None) -> None:
        """Remove the operations of a process set, or of all, that ranks have only refused."""
        for queue in list(self._by_id.values()):
            for one in [one for one in queue if not one.requests and set_id in (None, one.set_id)]:
                self.remove(one)


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

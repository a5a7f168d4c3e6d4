"""The operations that some ranks have submitted and others have not.

Note [refusals]: a rank may refuse an operation that others submit: its name is in use there, or its arguments are
invalid. It raises at once, and says so to the coordinator. The ranks make their calls under one key in the same order,
so the refused call belongs to the first operation of the key that the rank has no part in yet. There the others get
the error. A call that every rank refuses needs no answer. A barrier, or the end of a join, forgets the calls that only
some ranks have made, and that they have all refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rankless.extensions.horovod.engine.messages import RequestMetadata
from rankless.records.quantities import format_ranks


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

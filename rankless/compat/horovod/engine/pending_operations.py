"""What has been submitted and not yet been asked for: by handle, and by key."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rankless.compat.horovod.engine.requests import Kind, Submission

DUPLICATE = (
    "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is currently "
    "being processed.  If you want to request another tensor, use a different tensor name."
)


@dataclass
class Ticket:
    """What a handle stands for."""

    submissions: tuple[Submission, ...]
    results: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None
    event: torch.cuda.Event | None = None
    """When the tensors are ready on their device, and later when the results are."""

    @property
    def is_done(self) -> bool:
        """Whether the results, or an error, are there."""
        return self.error is not None or len(self.results) == len(self.submissions)


@dataclass(frozen=True)
class Outstanding:
    """One submission that has no result yet."""

    ticket: Ticket
    submission: Submission


Place = tuple[int, str]
"""A process set and a key."""


class Tickets:
    """All of one rank."""

    def __init__(self) -> None:
        self._tickets: dict[int, Ticket] = {}
        self._outstanding: dict[Place, Outstanding] = {}

    def open(self, handle: int, submissions: Sequence[Submission]) -> Ticket:
        """Take note of submissions. Raises ValueError if a name is being processed already."""
        places = [place_of(one) for one in submissions]
        if len(set(places)) < len(places) or any(place in self._outstanding for place in places):
            raise ValueError(DUPLICATE)
        ticket = self._tickets[handle] = Ticket(tuple(submissions))
        for place, one in zip(places, submissions, strict=True):
            self._outstanding[place] = Outstanding(ticket, one)
        return ticket

    def __getitem__(self, handle: int) -> Ticket:
        return self._tickets[handle]

    def __contains__(self, handle: int) -> bool:
        return handle in self._tickets

    def __bool__(self) -> bool:
        return bool(self._outstanding)

    def get(self, place: Place) -> Outstanding | None:
        """What has been submitted there."""
        return self._outstanding.get(place)

    def finish(self, place: Place, result: Any) -> None:
        """The result of a submission, or what went wrong; nothing happens if this rank has not submitted it."""
        found = self._outstanding.pop(place, None)
        if found is None:
            return
        if isinstance(result, Exception):
            found.ticket.error = result
        found.ticket.results[place[1]] = result

    def fail_all(self, error: Exception, *, but: Collection[Place] = ()) -> None:
        """Nothing that is outstanding will have a result, but what is at these places."""
        for place in [place for place in self._outstanding if place not in but]:
            self.finish(place, error)

    def forget(self, handle: int) -> Ticket:
        """A ticket, for the last time."""
        return self._tickets.pop(handle)


def place_of(one: Submission) -> Place:
    """Where ranks look for the same operation."""
    if one.kind is Kind.BARRIER:
        return one.set_id, "barrier"
    if one.kind is Kind.JOIN:
        return 0, "join"
    if one.kind is Kind.ADD_SET:
        return 0, f"add_process_set.{','.join(map(str, one.ranks))}"
    if one.kind is Kind.REMOVE_SET:
        return 0, f"remove_process_set.{one.set_id}"
    return one.set_id, one.key

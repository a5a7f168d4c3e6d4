"""Where a rank hands in what it has ready, and is told what to execute: rank 0 at its own coordinator, the others by
their link to it. None of it waits.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from selectors import EVENT_READ, BaseSelector
from typing import Protocol

import msgspec

from rankless.compat.horovod.engine.connections import Closed, Link, see_off
from rankless.compat.horovod.engine.coordinator import Coordinator, Decision
from rankless.compat.horovod.engine.messages import (
    Again,
    Down,
    Execute,
    Leave,
    Request,
    Resend,
    Submit,
    decode_from_coordinator,
    decode_from_rank,
    encode,
)
from rankless.compat.horovod.engine.pending_operations import Place
from rankless.compat.horovod.engine.stall_check import Stalls
from rankless.compat.horovod.engine.timeline import Timeline

Told = tuple[Execute, bytes]
"""What is to be executed, and the values of the items that ride."""


class Ended(Exception):
    """Some rank has shut down, or is gone: nothing more will be executed."""


class Desk(Protocol):
    """One rank's way to the coordinator."""

    def submit(self, place: Place, request: Request, values: bytes) -> None:
        """Something is ready; it goes with the next `told`, together with what else is ready until then."""
        ...

    def told(self, *, is_idle: bool) -> Iterator[Told]:
        """What has been decided since the last time. Raises Ended once there is nothing more."""
        ...

    def poll_seconds(self) -> float:
        """How long to wait at most before asking again."""
        ...

    def leave(self) -> None:
        """Tell that this rank shuts down, and close."""
        ...


class Spoke:
    """The desk of every rank but 0."""

    def __init__(self, link: Link, selector: BaseSelector, *, capacity: int) -> None:
        self._link = link
        self._capacity = capacity
        self._numbers: dict[Place, tuple[int, Request]] = {}
        self._outstanding: dict[Place, tuple[Request, bytes, int]] = {}
        """What was handed in, and under which number, if it is not negative."""
        self._again: dict[int, Place] = {}
        """Of what is outstanding: `_numbers` may have no room for it any more."""
        self._selector = selector
        self._is_closed = False
        selector.register(link, EVENT_READ)

    def submit(self, place: Place, request: Request, values: bytes) -> None:
        """Something is ready."""
        number, described = self._numbers.get(place, (-1, None))
        if described == request:
            self._again[number] = place
        else:
            number = -1
        self._outstanding[place] = (request, values, number)
        self._link.keep(encode(Submit(request) if number < 0 else Again(number)), (values,))

    def told(self, *, is_idle: bool) -> Iterator[Told]:  # noqa: ARG002  # the protocol's
        """What has been decided since the last time. Raises Ended once there is nothing more."""
        # If it has closed, what came before is still there to be read, and may say why.
        with suppress(Closed):
            self._link.flush()
        try:
            for said, values in self._link.receive():
                message = decode_from_coordinator(said)
                if isinstance(message, Execute):
                    self._take_numbers(message)
                    yield message, values
                elif isinstance(message, Resend):
                    self._describe(message.number)
                elif isinstance(message, Down):
                    self._close()  # rank 0 waits for that, so that its last word is not lost
                    raise Ended(message.why)
        except Closed:
            raise Ended("Rank 0 is gone.") from None

    def poll_seconds(self) -> float:
        """How long to wait at most before asking again."""
        return 0.001 if self._link.has_more_to_send else 1.0

    def leave(self) -> None:
        """Tell that this rank shuts down, and close."""
        with suppress(Closed):
            self._link.send(encode(Leave()))
        self._close()

    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._selector.unregister(self._link)
            see_off([self._link])

    def _take_numbers(self, message: Execute) -> None:
        for item in message.items:
            place = (message.set_id, item.key)
            request, _, number = self._outstanding.pop(place, (None, b"", -1))
            self._again.pop(number, None)
            if item.error:
                self._numbers.pop(place, None)
            elif item.number >= 0 and request is not None:
                self._numbers.pop(place, None)
                self._numbers[place] = (item.number, request)
                if len(self._numbers) > 2 * self._capacity:
                    del self._numbers[next(iter(self._numbers))]

    def _describe(self, number: int) -> None:
        place = self._again.pop(number, None)
        if place is None:
            raise Ended(f"Rank 0 asks for number {number}, which is not known here.")
        self._numbers.pop(place, None)
        request, values, _ = self._outstanding[place]
        with suppress(Closed):
            self._link.send(encode(Submit(request)), (values,))


class Hub:
    """Rank 0's desk, with the coordinator behind it."""

    def __init__(
        self,
        links: Mapping[int, Link],
        selector: BaseSelector,
        *,
        coordinator: Coordinator,
        timeline: Timeline,
        stalls: Stalls,
        cycle_seconds: float,
    ) -> None:
        self._links = dict(links)
        self._told_all: list[Link] = []
        """Those whose other sides know that all is over, and have perhaps not read it yet."""
        self._coordinator = coordinator
        self._timeline = timeline
        self._stalls = stalls
        self._cycle_seconds = cycle_seconds
        self._decided = 0.0
        self._selector = selector
        for rank, link in links.items():
            selector.register(link, EVENT_READ, rank)

    def submit(self, place: Place, request: Request, values: bytes) -> None:  # noqa: ARG002  # the protocol's
        """Something is ready."""
        self._take(0, request, values)

    def told(self, *, is_idle: bool) -> Iterator[Told]:
        """What has been decided since the last time. Raises Ended once there is nothing more."""
        for rank in [key.data for key, _ in self._selector.select(0)] if self._links else ():
            self._hear(rank)
        now = time.monotonic()
        if self._cycle_seconds and now - self._decided < self._cycle_seconds:
            is_idle = False
        for decision in self._coordinator.decide(is_idle=is_idle):
            self._decided = now
            self._timeline.cycle()
            yield from self._tell(decision)
        for link in self._links.values():
            if link.has_more_to_send:
                self._flush(link)
        if (why := self._stalls.look(self._coordinator, now)) is not None:
            self._end(why)

    def poll_seconds(self) -> float:
        """How long to wait at most before asking again."""
        if any(link.has_more_to_send for link in self._links.values()):
            return 0.001
        return min(self._cycle_seconds, 1.0) if self._coordinator.has_ready and self._cycle_seconds else 1.0

    def leave(self) -> None:
        """Tell that this rank shuts down, and close."""
        self._say_down("")
        see_off(self._told_all)
        self._told_all = []

    def _hear(self, rank: int) -> None:
        link = self._links[rank]
        try:
            for said, values in link.receive():
                message = decode_from_rank(said)
                if isinstance(message, Submit):
                    self._take(rank, message.request, values)
                elif isinstance(message, Again):
                    now = time.monotonic()
                    if not self._coordinator.submit_again(rank, message.number, values, now):
                        link.send(encode(Resend(message.number)))
                elif isinstance(message, Leave):
                    self._end("", but=rank)
        except Closed:
            self._end(f"Rank {rank} is gone.", but=rank)
        except msgspec.DecodeError as error:
            self._end(f"Rank {rank} sent something that is no message: {error}.")

    def _take(self, rank: int, request: Request, values: bytes) -> None:
        self._coordinator.submit(rank, request, values, time.monotonic())

    def _tell(self, decision: Decision) -> Iterator[Told]:
        values = b"".join(decision.values)
        said = encode(decision.message(0)) if decision.is_same_for_all else None
        for rank in decision.members:
            if rank:
                self._send(rank, said or encode(decision.message(rank)), values)
        if 0 in decision.members:
            yield decision.message(0), values

    def _send(self, rank: int, said: bytes, values: bytes) -> None:
        try:
            self._links[rank].send(said, (values,))
        except Closed:
            self._end(f"Rank {rank} is gone.", but=rank)

    def _flush(self, link: Link) -> None:
        try:
            link.flush()
        except Closed:
            rank = next(rank for rank, each in self._links.items() if each is link)
            self._end(f"Rank {rank} is gone.", but=rank)

    def _end(self, why: str, *, but: int | None = None) -> None:
        self._say_down(why, but=but)
        raise Ended(why)

    def _say_down(self, why: str, *, but: int | None = None) -> None:
        for rank, link in self._links.items():
            if rank != but:
                with suppress(Closed):
                    link.send(encode(Down(why)))
        for rank, link in self._links.items():
            self._selector.unregister(link)
            if rank == but:
                link.close()
            else:
                link.say_no_more()
                self._told_all.append(link)
        self._links = {}

"""The requests of one worker to one server: those without an answer, and changes that the server may still lose.

Note [requests of a lost server]: a server that starts again has all transactions that it had committed, and nothing
else. So a worker keeps its changes until the server has said that they are committed. To a new process of the server it
sends, in the order in which it made them, the tables that it has opened, the changes after the last committed
transaction, and the requests without an answer. The parts of lost workers come before all other changes, because the
server may make the step once it has the worker's own part. Transfers of contents begin anew, because the server has
lost its part of them.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rankless.extensions.servers.service.wire.messages import MOST_IN_FLIGHT, Frame, Kind, MessageHeader

CHANGES = (
    Kind.PUSH,
    Kind.PUSH_SEVERAL,
    Kind.RESET,
    Kind.READY,
    Kind.PREPARE,
    Kind.PREPARE_SEVERAL,
    Kind.PUSH_FOR_LOST,
)
TRANSFERS = (Kind.CONTENTS, Kind.CONTENTS_PART, Kind.RESTORE, Kind.RESTORE_PART, Kind.RESTORE_END)


class SentRequest(NamedTuple):
    """A request. Its number identifies it in this process. Each session numbers requests anew, by sequence."""

    number: int
    header: MessageHeader
    payload: Sequence[Frame]


class SentRequests:
    """Numbers requests, and knows what to send again to a server that has started again."""

    def __init__(self) -> None:
        self._last_number = 0
        self._last_sequence = 0
        self._queue: deque[SentRequest] = deque()
        """Requests that have not been sent in this session."""
        self._in_flight: dict[int, SentRequest] = {}
        """Those sent without an answer, by sequence."""
        self._opened: list[SentRequest] = []
        self._kept: list[SentRequest] = []
        """Changes that are not known to be committed."""
        self.committed = 0
        """The last transaction that the server is known to have committed."""

    def add(self, header: MessageHeader, payload: Sequence[Frame]) -> int:
        """Add a request, and return its number."""
        self._last_number += 1
        request = SentRequest(self._last_number, header, payload)
        if header.kind in CHANGES:
            self._kept.append(request)
        if header.kind == Kind.OPEN:
            self._opened.append(request)
        self._queue.append(request)
        return request.number

    def take_next(self) -> tuple[int, int, SentRequest] | None:
        """Return the next request to send with its sequence, and the sequence up to which all answers have arrived."""
        acknowledged = self.acknowledged
        if not self._queue or self._last_sequence - acknowledged >= MOST_IN_FLIGHT:
            return None
        self._last_sequence += 1
        request = self._in_flight[self._last_sequence] = self._queue.popleft()
        return self._last_sequence, acknowledged, request

    def list_in_flight(self, first_sequence: int = 0) -> Iterator[tuple[int, SentRequest]]:
        """Yield the requests without an answer from a sequence on, in their order."""
        for sequence in sorted(self._in_flight):
            if sequence >= first_sequence:
                yield sequence, self._in_flight[sequence]

    def finish(self, sequence: int) -> SentRequest | None:
        """Return the request that an answer belongs to. None: it has been answered before."""
        return self._in_flight.pop(sequence, None)

    def find(self, sequence: int) -> SentRequest | None:
        """Return the request without an answer that has a sequence."""
        return self._in_flight.get(sequence)

    def abandon(self, sequence: int) -> SentRequest | None:
        """Return the last request, which the server has refused, so that its sequence is that of the next one.

        None: it is not the last one, or has been answered.
        """
        if sequence != self._last_sequence or sequence not in self._in_flight:
            return None
        self._last_sequence -= 1
        return self._in_flight.pop(sequence)

    def note_committed(self, transaction: int) -> None:
        """Forget changes that the server has committed."""
        if transaction > self.committed:
            self.committed = transaction
            self._kept = [request for request in self._kept if request.header.transaction > transaction]

    def forget_after(self, transaction: int) -> None:
        """Forget changes of later transactions: this worker makes them again."""
        self._kept = [request for request in self._kept if request.header.transaction <= transaction]

    def restart(self, committed: int) -> tuple[list[int], list[int]]:
        """Prepare to send again what a new process of the server lacks; see Note [requests of a lost server].

        Args:
            committed: The last transaction that it has.

        Returns:
            Numbers of requests that the lost process has done, and of transfers that must begin anew.
        """
        waiting = [*(request for _, request in self.list_in_flight()), *self._queue]
        self.note_committed(committed)
        kept = {request.number for request in self._kept}
        done = [each.number for each in waiting if each.header.kind in CHANGES and each.number not in kept]
        interrupted = [each.number for each in waiting if each.header.kind in TRANSFERS]
        others = [each for each in waiting if each.header.kind not in (*CHANGES, *TRANSFERS, Kind.OPEN)]
        self._in_flight.clear()
        self._last_sequence = 0
        kept_in_order = sorted(self._kept, key=lambda each: each.header.kind != Kind.PUSH_FOR_LOST)
        self._queue = deque([*self._opened, *kept_in_order, *others])
        return done, interrupted

    @property
    def in_flight(self) -> int:
        """How many of the requests that a server may be asked for at once are taken."""
        return self._last_sequence - self.acknowledged + len(self._queue)

    @property
    def is_full(self) -> bool:
        """Whether an answer must arrive before another request."""
        return self.in_flight >= MOST_IN_FLIGHT

    @property
    def acknowledged(self) -> int:
        """The sequence up to which all answers have arrived."""
        return min(self._in_flight, default=self._last_sequence + 1) - 1

"""What a server keeps of each worker: the number of its last request, and answers that it may ask for again."""

from typing import NamedTuple

from rankless.extensions.servers.service.contents_transfer import ContentsSnapshot, IncomingContents
from rankless.extensions.servers.service.wire.messages import MOST_IN_FLIGHT, Frame, MessageHeader, MessageRefusedError


class RequestAnswer(NamedTuple):
    """The answer to one request: a header, and payload frames."""

    header: MessageHeader
    payload: tuple[Frame, ...] = ()


class WorkerSession:
    """One incarnation of a worker, and its connection."""

    def __init__(self, *, worker: int, incarnation: int, instance: int, number: int, identity: bytes) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.instance = instance
        self.number = number
        self.identity = identity
        self.last_sequence = 0
        self.answers: dict[int, RequestAnswer] = {}
        """By number of the request, those that the worker has not acknowledged."""
        self.snapshots: dict[int, ContentsSnapshot] = {}
        """By number of the table, what the worker is reading."""
        self.incoming: dict[int, IncomingContents] = {}
        """By number of the table, what the worker is restoring."""
        self._acknowledged = 0

    def reconnect(self, number: int, identity: bytes) -> None:
        """Go on over another connection."""
        self.number, self.identity = number, identity

    def is_next(self, header: MessageHeader) -> bool:
        """Return whether a request is the next one. Otherwise it is an earlier one, or numbers are missing.

        Raises:
            MessageRefusedError: It acknowledges answers that cannot have arrived, or too many requests are in flight.
        """
        next_sequence = self.last_sequence + 1
        if header.sequence != next_sequence:
            return False
        if not self._acknowledged <= header.acknowledged < next_sequence:
            raise MessageRefusedError("an acknowledgement of other answers than those sent")
        if next_sequence - header.acknowledged > MOST_IN_FLIGHT:
            raise MessageRefusedError("too many requests in flight")
        for sequence in range(self._acknowledged + 1, header.acknowledged + 1):
            self.answers.pop(sequence, None)
        self._acknowledged = header.acknowledged
        return True

    def is_answered_later(self, sequence: int) -> bool:
        """Return whether an earlier request waits for other workers."""
        return self._acknowledged < sequence <= self.last_sequence and sequence not in self.answers

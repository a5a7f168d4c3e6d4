"""A worker's connections to a server and its copy, which look like one connection.

Note [requests to copies]: in the mode `sync` a server's tables depend on the requests that it gets, and not on their
order between workers: a step is made when all parts of it have arrived, in the order of workers. So a server and its
copy stay bitwise equal if both get each request that changes something. They get it in the order of the worker's
requests, and a call waits for both. Rows and contents are read from the first one that is not lost: a read changes
nothing. The agents say which servers are lost. The requests that a lost one has not answered are dropped, and its reads
are sent to the other one. In the modes without common steps a server makes the steps of different workers as they
arrive. So a server and its copy make the same steps, each once, in orders that may differ as those of two runs do.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from rankless.errors import RanklessError, ServerError
from rankless.extensions.servers.service.server_connection import ServerAnswer, ServerConnection, TransferLostError
from rankless.extensions.servers.service.wire.authentication import ServerWelcome
from rankless.extensions.servers.service.wire.joint_messages import renumber_joint_pull, renumber_slices
from rankless.extensions.servers.service.wire.messages import Frame, Kind, MessageHeader
from rankless.extensions.servers.service.wire.prepared_pushes import renumber_pushes
from rankless.extensions.servers.service.wire.worker_sockets import WorkerSocket

_READS = (Kind.PULL, Kind.PULL_SEVERAL, Kind.CONTENTS, Kind.CONTENTS_PART)
"""What one server answers for both."""


Renumber = Callable[[Sequence[Frame], Callable[[int], int]], Sequence[Frame]]
_RENUMBERED: Mapping[int, Renumber] = {
    Kind.READY: renumber_pushes,
    Kind.PULL_SEVERAL: renumber_joint_pull,
    Kind.PUSH_SEVERAL: renumber_slices,
    Kind.PREPARE_SEVERAL: renumber_slices,
}
"""Requests whose payloads have numbers of tables."""


@dataclass(eq=False)
class _ReplicatedRequest:
    """A request, and its number on each connection that has it."""

    header: MessageHeader
    payload: Sequence[Frame]
    numbers: dict[ServerConnection, int]


class ReplicatedConnection:
    """Numbered requests to a server and its copy, with the methods of `ServerConnection`.

    Args:
        connections: Those to the server and to its copy.
        is_lost: Returns whether a server is lost for good, by its index.
        notify: Shows the user a line, if it is set.
    """

    def __init__(
        self,
        connections: Sequence[ServerConnection],
        *,
        is_lost: Callable[[int], bool],
        notify: Callable[[str], None] | None,
    ) -> None:
        first = connections[0]
        self.index, self.address, self.name = first.index, first.address, first.name
        self._living = list(connections)
        self._indices = [each.index for each in connections]
        self._worker = first.worker
        self._is_lost, self._notify = is_lost, notify
        self._last_number = 0
        self._requests: dict[int, _ReplicatedRequest] = {}
        """Those whose answers nobody has taken."""
        self._tables: list[dict[ServerConnection, int]] = []
        """By the number of a table here, its number on each server: workers may open tables in different orders."""
        self._readers: dict[int, ServerConnection] = {}
        """By table, the connection whose server has the contents that are being read."""

    @property
    def welcome(self) -> ServerWelcome | None:
        """The first server's answer to the greeting, once all that are not lost have answered."""
        welcomes = [each.welcome for each in self._living]
        return None if None in welcomes else welcomes[0]

    @property
    def welcomes(self) -> list[ServerWelcome]:
        """The answers of all servers to the greeting, as far as they have arrived."""
        return [each.welcome for each in self._living if each.welcome is not None]

    @property
    def sockets(self) -> list[WorkerSocket]:
        """The sockets on which messages arrive."""
        return [socket for each in self._living for socket in each.sockets]

    @property
    def in_flight(self) -> int:
        """How many of the requests that may be without an answer are taken, on the server that has most."""
        return max(each.in_flight for each in self._living)

    @property
    def is_full(self) -> bool:
        """Whether an answer must arrive before another request."""
        return any(each.is_full for each in self._living)

    @property
    def committed(self) -> int:
        """The last transaction that all servers are known to have committed."""
        return min(each.committed for each in self._living)

    def greet(self) -> None:
        """Ask the servers that are not lost for challenges."""
        self._drop_lost()
        for each in self._living:
            each.greet()

    def send(self, header: MessageHeader, payload: Sequence[Frame] = ()) -> int:
        """Send a request to all servers that need it, and return its number."""
        self._last_number += 1
        request = self._requests[self._last_number] = _ReplicatedRequest(header, payload, {})
        self._send(request)
        return self._last_number

    def abandon(self, number: int) -> None:
        """Wait no more for the answer to a request that reads."""
        request = self._requests.pop(number, None)
        for connection, own in () if request is None else request.numbers.items():
            connection.abandon(own)

    def forget_after(self, transaction: int) -> None:
        """Send changes of later transactions to no later process of the servers."""
        for each in self._living:
            each.forget_after(transaction)

    def has_answer(self, number: int) -> bool:
        """Return whether the answers to a request have arrived from all servers that have it."""
        request = self._requests.get(number)
        return request is not None and all(connection.has_answer(own) for connection, own in request.numbers.items())

    def take_answer(self, number: int) -> ServerAnswer:
        """Return an answer that has arrived: the first server's. Raises the error that an answer carries."""
        request = self._requests.pop(number)
        answers: dict[ServerConnection, ServerAnswer] = {}
        errors: list[RanklessError] = []
        for connection, own in request.numbers.items():
            try:
                answers[connection] = connection.take_answer(own)
            except RanklessError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        if not answers:
            raise TransferLostError(
                expected=f"{self.name} to run while its contents are read",
                found="it is lost, and its copy continues",
                fix="read them again",
            )
        answer = next(iter(answers.values()))
        if request.header.kind != Kind.OPEN:
            return answer
        self._tables.append({connection: each.header.table for connection, each in answers.items()})
        return answer._replace(header=answer.header._replace(table=len(self._tables) - 1))

    def receive(self) -> None:
        """Take all messages that are there. Raises ServerError for a server that does not belong to this run."""
        for each in self._living:
            each.receive()

    def check_alive(self) -> None:
        """Drop servers that are lost, and begin to reconnect to others. Raises ServerError if both are lost."""
        self._drop_lost()
        for each in self._living:
            each.check_alive()

    def close(self) -> None:
        """Close the connections."""
        for each in self._living:
            each.close()

    def _send(self, request: _ReplicatedRequest) -> None:
        """Send a request to all servers, or, if it reads, to one. Contents are read from the server that has begun."""
        kind, table = request.header.kind, request.header.table
        targets = self._living[:1] if kind in _READS else self._living
        if kind == Kind.CONTENTS:
            self._readers[table] = self._living[0]
        if kind == Kind.CONTENTS_PART and self._readers.get(table) not in targets:
            return  # which `take_answer` tells
        for connection in targets:
            payload = request.payload
            if kind in _RENUMBERED:
                payload = _RENUMBERED[kind](payload, partial(self._find_number, connection))
            request.numbers[connection] = connection.send(self._translate(request.header, connection), payload)

    def _translate(self, header: MessageHeader, connection: ServerConnection) -> MessageHeader:
        """Return the header with the number that the server's table has there."""
        if header.kind == Kind.OPEN or header.table >= len(self._tables):
            return header
        return header._replace(table=self._find_number(connection, header.table))

    def _find_number(self, connection: ServerConnection, table: int) -> int:
        """Return the number that a server has for a table."""
        return self._tables[table][connection]

    def _drop_lost(self) -> None:
        for each in list(self._living):
            if self._is_lost(each.index):
                self._drop(each)

    def _drop(self, lost: ServerConnection) -> None:
        """Go on without a server."""
        if len(self._living) == 1:
            numbers = " and ".join(map(str, self._indices))
            raise ServerError(
                expected=f"{lost.name} to answer worker {self._worker}",
                found=f"the connection has broken: servers {numbers}, which have the same tables, are lost",
                fix="start the run again from a checkpoint",
            )
        self._living.remove(lost)
        if lost.is_waiting and self._notify is not None:
            other = self._living[0].name
            self._notify(f"worker {self._worker} continues without {lost.name}: {other} has the same tables")
        lost.close()
        for request in self._requests.values():
            own = request.numbers.pop(lost, None)
            if own is not None and lost.has_answer(own) and not request.numbers:
                request.numbers[lost] = own  # the answer has arrived
            elif own is not None and not request.numbers and request.header.kind in (Kind.PULL, Kind.PULL_SEVERAL):
                self._send(request)

"""A worker's requests to all servers of a run, and waiting for their answers.

Note [upkeep]: a server that is killed loses the parts of steps that it had noted and not yet made. Each worker must
send its own again, or no worker's next read is ever answered. A worker may be anywhere then: in a collective, in which
it waits for a worker that waits for this part; in a reader of data; in the script. So connections are looked after at
all times. While the worker makes requests, the waiting for their answers does it. Otherwise `tend` does, which a thread
calls several times a second. A lock keeps them apart.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TypeVar

from rankless.errors import RanklessError, ServerError, TableError
from rankless.extensions.servers.config import ServersConfig
from rankless.extensions.servers.service.replicated_connection import ReplicatedConnection
from rankless.extensions.servers.service.server_connection import (
    ConnectionSettings,
    ReadInterruptedError,
    ServerAnswer,
    ServerConnection,
)
from rankless.extensions.servers.service.wire.authentication import WorkerHello, draw_number
from rankless.extensions.servers.service.wire.messages import MOST_IN_FLIGHT, Frame, MessageHeader

Result = TypeVar("Result")

SentNumber = tuple[int, int]
"""The server and the number of a request."""

_SLICE_SECONDS = 0.25
LEAVE_SECONDS = 30.0
_MOST_EARLY = MOST_IN_FLIGHT - 4
"""Most requests to a server without an answer, beside which others are sent early."""


class ServerRequests:
    """Connections to all servers of a run."""

    def __init__(self, config: ServersConfig, hello: WorkerHello, settings: ConnectionSettings) -> None:
        """Begin to connect. `hello` is that to server 0, without the client's random number."""
        self._sockets, self._lock = settings.open_sockets(config), threading.RLock()
        self._is_tended = settings.reconnect_seconds > 0
        """Whether connections are made again that break. See Note [upkeep]."""
        self._on_wait, self._is_interrupted, self._recover = settings.on_wait, settings.is_interrupted, settings.recover
        self._reads: list[SentNumber] | None = None
        """The requests of a read, which may be abandoned; None during changes."""
        self._early: set[SentNumber] = set()
        """Requests for rows that nobody needs yet. They may be abandoned, too."""
        self._failure: RanklessError | None = None
        self.connections: list[ServerConnection | ReplicatedConnection] = []
        """One for each part of the tables."""
        instance, parts = draw_number(), config.part_count
        fields = {name: getattr(hello, name) for name in ("worker", "worker_count", "incarnation")}
        if config.replicas:  # the agent decides first whether a server is lost
            settings = settings._replace(reconnect_seconds=2 * settings.reconnect_seconds)
        try:
            single = [
                ServerConnection(
                    self._sockets,
                    config,
                    WorkerHello(**fields, instance=instance, server_index=index, server_count=parts),
                    settings,
                )
                for index in range(len(config.addresses))
            ]
            self.connections += single[:parts]
            if config.replicas:
                self.connections = [
                    ReplicatedConnection(single[part::parts], is_lost=settings.is_lost, notify=settings.notify)
                    for part in range(parts)
                ]
        except ServerError:
            self.close()
            raise

    def connect(self, timeout_seconds: float) -> None:
        """Wait until all servers have answered. Raises ServerError if one cannot be reached in time."""
        start = time.monotonic()
        for connection in self.connections:
            connection.greet()
        while missing := [each for each in self.connections if each.welcome is None]:
            waited = time.monotonic() - start
            if waited > timeout_seconds:
                raise ServerError(
                    expected=f"{missing[0].name} to answer within {timeout_seconds:g} seconds",
                    found="no answer",
                    fix="look at the server's log; is the address right, and does a firewall let it through?",
                )
            self._poll(missing, min(_SLICE_SECONDS, timeout_seconds / 4))
            for connection in missing:
                connection.receive()
                connection.check_alive()
                connection.greet()
            if self._on_wait is not None and waited > _SLICE_SECONDS:
                self._on_wait(waited, missing[0].index)
        if self._is_tended:
            self._sockets.keep_calling(self.tend)

    def tend(self) -> None:
        """Take answers, connect to servers again, and send them what they lack, unless an exchange does; Note [upkeep].

        An error is raised by the next exchange.
        """
        if self._failure is None and self._lock.acquire(blocking=False):
            try:
                for connection in self.connections:
                    connection.receive()
                    connection.check_alive()
            except RanklessError as error:
                self._failure = error
            finally:
                self._lock.release()

    @contextlib.contextmanager
    def exchange(self) -> Iterator[None]:
        """Send requests and wait for answers within the context.

        If anything but a refusal interrupts it, nobody knows what the servers have done of it. Then later exchanges
        raise the error again, because a repeated push could count twice.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._failure = ServerError(
                expected="calls that end before the next one",
                found="a call that was interrupted, for example by an exception of on_wait, or by another thread",
                fix="make a new client, with the next incarnation",
            )
            try:
                yield
            except ServerError as error:
                self._failure = error
                raise
            except (TableError, ReadInterruptedError):
                self._failure = None
                raise
            self._failure = None

    def read(self, action: Callable[[], Result]) -> Result:
        """Return what an exchange returns that only reads. It is made again if a lost worker has interrupted it.

        Raises:
            ReadInterruptedError: A worker was lost, and the caller must first continue without it.
        """
        while True:
            try:
                with self.exchange():
                    self._reads = []
                    return action()
            except ReadInterruptedError:
                self._abandon(self._reads or ())
                self._reads = None
                self._recover()
            finally:
                self._reads = None

    @property
    def has_room(self) -> bool:
        """Whether requests can be sent early, so that others still find room besides them."""
        return all(each.in_flight < _MOST_EARLY for each in self.connections)

    def note_early(self, requests: Iterable[SentNumber]) -> None:
        """Note that nobody needs the answers of requests yet."""
        self._early.update(requests)

    def claim_early(self, requests: Collection[SentNumber]) -> bool:
        """Return whether answers to early requests are still good. The present read then waits for them."""
        if not self._early.issuperset(requests):
            return False
        self._early.difference_update(requests)
        assert self._reads is not None
        self._reads += requests
        return True

    def abandon_early(self, requests: Collection[SentNumber]) -> None:
        """Wait no more for the answers of requests that were sent early."""
        unneeded = self._early.intersection(requests)
        self._early -= unneeded
        self._abandon(unneeded)

    def finish_early(self) -> None:
        """Wait until servers have answered requests that were sent early and that nobody has needed.

        Changes wait for nothing that the loss of a worker could keep from happening. So none may follow such requests,
        which servers answer after a step of all workers.
        """
        if self._early:
            self.read(lambda: self._wait(self._early))
            self.abandon_early(self._early.copy())

    def send(self, server: int, header: MessageHeader, payload: Sequence[Frame] = ()) -> SentNumber:
        """Send a request, and return the server and the request's number, for `answers`.

        The payload must not change before its answer has arrived.
        """
        connection = self.connections[server]
        if connection.is_full:
            self._wait_for(lambda: {server} if connection.is_full else set())
        number = connection.send(header, payload)
        if self._reads is not None:
            self._reads.append((server, number))
        return server, number

    def answers(self, requests: Iterable[SentNumber]) -> list[ServerAnswer]:
        """Wait for the answers to requests, and return them in this order.

        Raises:
            TableError: A server could not do a request.
            ServerError: A server has died, or does not understand a request.
        """
        requests = list(requests)
        self._wait(requests)
        # All are taken before the error of one is raised.
        taken, errors = [], []
        for server, sequence in requests:
            try:
                taken.append(self.connections[server].take_answer(sequence))
            except RanklessError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return taken

    def ask_all(self, header: MessageHeader, payload: Sequence[Frame] = ()) -> list[ServerAnswer]:
        """Send one request to all servers, and return their answers."""
        return self.answers([self.send(server, header, payload) for server in range(len(self.connections))])

    def leave(self, header: MessageHeader) -> None:
        """Send a last request to all servers, and wait half a minute for the answers."""
        requests = [self.send(server, header) for server in range(len(self.connections))]
        self._wait(requests, most_seconds=LEAVE_SECONDS)

    def close(self) -> None:
        """Close all connections."""
        self._sockets.end_calls()
        for connection in self.connections:
            connection.close()
        self._sockets.close()

    def _abandon(self, requests: Iterable[SentNumber]) -> None:
        with self._lock:
            for server, number in requests:
                self.connections[server].abandon(number)

    def _wait(self, requests: Iterable[SentNumber], *, most_seconds: float = float("inf")) -> None:
        """Wait until requests have answers."""
        missing = set(requests)

        def find_servers() -> set[int]:
            answered = {each for each in missing if self.connections[each[0]].has_answer(each[1])}
            missing.difference_update(answered)
            return {server for server, _ in missing}

        self._wait_for(find_servers, most_seconds=most_seconds)

    def _wait_for(self, find_servers: Callable[[], set[int]], *, most_seconds: float = float("inf")) -> None:
        """Receive messages until a function returns no more servers that must send some."""
        start = time.monotonic()
        servers = find_servers()
        while servers:
            connections = [self.connections[server] for server in sorted(servers)]
            # Another server may wait for this worker's part of a step, without which these servers never answer.
            connections += [each for each in self.connections if each.welcome is None and each not in connections]
            ready = self._poll(connections, _SLICE_SECONDS)
            for connection in connections:
                connection.receive()
            servers = find_servers()
            if servers and not ready:
                waited = time.monotonic() - start
                for connection in self.connections:
                    connection.check_alive()
                if waited > most_seconds:
                    return
                if self._reads is not None and self._is_interrupted():
                    raise ReadInterruptedError
                if self._on_wait is not None:
                    self._on_wait(waited, connections[0].index)

    def _poll(self, connections: Sequence[ServerConnection | ReplicatedConnection], seconds: float) -> bool:
        """Return whether a message has arrived."""
        return self._sockets.wait([socket for connection in connections for socket in connection.sockets], seconds)

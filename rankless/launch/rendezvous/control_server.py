"""Host 0's end of the control channel: it accepts the other hosts, receives their messages and detects lost ones."""

import selectors
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from rankless.config.run_config import UNKNOWN_HOST
from rankless.errors import JoinError, RanklessError
from rankless.launch.rendezvous.control_connection import ConnectionBrokenError, ControlConnection
from rankless.launch.rendezvous.host_consistency import HostFacts
from rankless.launch.rendezvous.messages import (
    HEARTBEAT_SECONDS,
    HEARTBEAT_TIMEOUT_SECONDS,
    ControlMessage,
    Heartbeat,
    HostEnded,
    JoinRefused,
    JoinRequest,
    PortOpened,
    PortsTried,
    ProcessesStarted,
    RecordingChunk,
    RoleMessage,
    StartRefused,
    WorkerMessageReceived,
    WorkerOutput,
    WorkerRecords,
)
from rankless.launch.signal_reader import Interrupts, RendezvousInterrupted
from rankless.records.unauthenticated_client_limits import NewClients

CLOSE_TIMEOUT_SECONDS = 1.0
_ACCEPTS_PER_POLL = 64


HostReport = (
    PortOpened
    | PortsTried
    | RoleMessage
    | StartRefused
    | ProcessesStarted
    | WorkerRecords
    | WorkerMessageReceived
    | RecordingChunk
    | WorkerOutput
    | HostEnded
)


@dataclass(frozen=True)
class HostJoined:
    """A host has joined the job."""

    host: int
    facts: HostFacts
    received_seconds: float
    """Host 0's clock at that time."""


@dataclass(frozen=True)
class HostReported:
    """A host has sent a message about its ports or its processes."""

    host: int
    message: HostReport


@dataclass(frozen=True)
class HostDisconnected:
    """A host's agent is gone, or sends no heartbeat."""

    host: int
    reason: str
    has_ended: bool = False
    """Whether it had sent `HostEnded`: none of its workers was alive."""


@dataclass(frozen=True)
class ConnectionRejected:
    """A client is not one of the job's hosts, or has not authenticated itself."""

    address: str
    reason: str


ServerEvent = HostJoined | HostReported | HostDisconnected | ConnectionRejected


@dataclass(eq=False)
class _Client:
    connection: ControlConnection
    address: str
    last_received_at: float
    host: int | None = None
    has_ended: bool = False
    """Whether the host has sent `HostEnded`."""
    waits_for_write: bool = field(default=False)


class ControlServer:
    """All connections of host 0. A selector can wait for it; `poll` then returns what has happened."""

    def __init__(self, listening: socket.socket, *, token: bytes, host_count: int) -> None:
        listening.setblocking(False)
        self._listening = listening
        self._token = token
        self._host_count = host_count
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ, None)
        self._clients: list[_Client] = []
        self._new_clients: NewClients[_Client] = NewClients(self._drop_late)
        self._rejected: list[ConnectionRejected] = []
        """Those of which `poll` has not told."""
        self._last_heartbeat_at = 0.0
        self._polled_at: float | None = None
        self.longest_pause_seconds = 0.0
        """The longest time between two polls: a signal had stopped this process, or the machine was overloaded."""

    def fileno(self) -> int:
        """Return the descriptor for a selector, where the system's selectors have descriptors."""
        return self._selector.fileno()

    @property
    def connected_hosts(self) -> frozenset[int]:
        """The other hosts that have joined and are not lost."""
        return frozenset(client.host for client in self._clients if client.host is not None)

    @property
    def running_hosts(self) -> frozenset[int]:
        """The connected hosts that have not sent `HostEnded`."""
        return frozenset(client.host for client in self._clients if client.host is not None and not client.has_ended)

    def poll(self, now: float) -> list[ServerEvent]:
        """Return the events since the last call, and send heartbeats if they are due."""
        if self._polled_at is not None:
            self.longest_pause_seconds = max(self.longest_pause_seconds, now - self._polled_at)
        self._polled_at = now
        events: list[ServerEvent] = []
        ready = {key.data for key, _ in self._selector.select(0)}
        if None in ready:
            self._accept(now)
        for client in list(self._clients):
            if client in self._clients:
                events += self._receive(client, now, is_ready=client in ready)
        self._new_clients.drop_late(now)
        rejected, self._rejected = self._rejected, []
        events += rejected
        if now - self._last_heartbeat_at >= HEARTBEAT_SECONDS:
            self._last_heartbeat_at = now
            self.broadcast(Heartbeat())
        return events

    def send(self, host: int, message: ControlMessage) -> None:
        """Send a message to one host, if it is connected."""
        for client in self._clients:
            if client.host == host:
                self._send(client, message)

    def broadcast(self, message: ControlMessage) -> None:
        """Send a message to every connected host."""
        for client in self._clients:
            if client.host is not None:
                self._send(client, message)

    def close(self) -> None:
        """Close all connections, after the hosts have taken what was sent to them or CLOSE_TIMEOUT_SECONDS."""
        # Closing a socket with unread data would reset the connection, and the other side could lose the last message.
        deadline = time.monotonic() + CLOSE_TIMEOUT_SECONDS
        waiting = [client for client in self._clients if client.host is not None]
        while waiting and time.monotonic() < deadline:
            waiting = [client for client in waiting if not client.connection.finish_closing()]
            time.sleep(0.002 if waiting else 0)
        for client in list(self._clients):
            self._drop(client)
        with suppress(KeyError):
            self._selector.unregister(self._listening)
        self._listening.close()
        self._selector.close()

    def _accept(self, now: float) -> None:
        for _ in range(_ACCEPTS_PER_POLL):
            try:
                accepted, address = self._listening.accept()
            except OSError:  # no more clients, or no descriptors
                return
            connection = ControlConnection(accepted, side="server", token=self._token)
            client = _Client(connection, str(address[0]), now)
            self._clients.append(client)
            self._selector.register(accepted, selectors.EVENT_READ, client)
            self._new_clients.add(client, now)

    def _drop_late(self, client: _Client) -> None:
        self._drop(client)
        self._rejected.append(ConnectionRejected(client.address, "it did not authenticate itself in time"))

    def _receive(self, client: _Client, now: float, *, is_ready: bool) -> list[ServerEvent]:
        events: list[ServerEvent] = []
        try:
            for message in client.connection.receive() if is_ready else ():
                client.last_received_at = now
                events += self._process(client, message)
            self._check_timeouts(client, now)
            self._update_selector(client)
        except ConnectionBrokenError as error:
            if client in self._clients:
                self._drop(client)
                if client.host is None:
                    events.append(ConnectionRejected(client.address, str(error)))
                else:
                    events.append(HostDisconnected(client.host, str(error), has_ended=client.has_ended))
        return events

    def _process(self, client: _Client, message: ControlMessage) -> list[ServerEvent]:
        if isinstance(message, JoinRequest) and client.host is None:
            return self._admit(client, message)
        if client.host is None:
            raise ConnectionBrokenError("a message out of order")
        if isinstance(message, HostReport):
            client.has_ended = client.has_ended or isinstance(message, HostEnded)
            return [HostReported(client.host, message)]
        if not isinstance(message, Heartbeat):
            raise ConnectionBrokenError("a message out of order")
        return []

    def _admit(self, client: _Client, request: JoinRequest) -> list[ServerEvent]:
        refused = None
        if request.host == UNKNOWN_HOST:
            free = [index for index in range(1, self._host_count) if index not in self.connected_hosts]
            request = msgspec.structs.replace(request, host=free[0] if free else self._host_count)
        if not 0 < request.host < self._host_count:
            refused = JoinRefused(
                expected=f"a host from 1 to {self._host_count - 1}",
                found=f"{request.facts.name} as host {request.host}",
                fix="start the job with the same hosts on every host; --host-rank counts from 0",
            )
        elif request.host in self.connected_hosts:
            refused = JoinRefused(
                expected=f"one host {request.host}",
                found=f"{request.facts.name} from {client.address} as a second one",
                fix="start the job once on each host; give each its own --host-rank",
            )
        if refused is not None:
            self._send(client, refused)
            raise ConnectionBrokenError(refused.found)
        client.host = request.host
        self._new_clients.remove(client)
        return [HostJoined(request.host, request.facts, time.time())]

    def _check_timeouts(self, client: _Client, now: float) -> None:
        silent_seconds = now - client.last_received_at
        if client.host is not None and silent_seconds > HEARTBEAT_TIMEOUT_SECONDS:
            raise ConnectionBrokenError(f"no heartbeat for {silent_seconds:.0f} s")

    def _send(self, client: _Client, message: ControlMessage) -> None:
        # A broken connection raises at the next `receive`.
        with suppress(ConnectionBrokenError):
            client.connection.send(message)
            self._update_selector(client)

    def _update_selector(self, client: _Client) -> None:
        """Wait for a writable socket only while data is unsent."""
        if client.waits_for_write != client.connection.has_unsent_data and client in self._clients:
            client.waits_for_write = client.connection.has_unsent_data
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.waits_for_write else 0)
            self._selector.modify(client.connection, events, client)

    def _drop(self, client: _Client) -> None:
        self._clients.remove(client)
        self._new_clients.remove(client)
        with suppress(KeyError, ValueError):
            self._selector.unregister(client.connection)
        client.connection.close()


ANSWER_TIMEOUT_SECONDS = 20.0
"""For one host's answer. An overloaded host may be late."""
_POLL_SECONDS = 0.05
INTERRUPTED = JoinRefused(expected="a job that starts", found="host 0 received a signal", fix="start it again")

_Answer = TypeVar("_Answer", bound=HostReport)


def receive_answers(
    server: ControlServer,
    kinds: tuple[type[_Answer], ...],
    hosts: Collection[int],
    *,
    names: Sequence[str],
    interrupts: Interrupts,
    own_answer: Callable[[], _Answer | None] = lambda: None,
) -> dict[int, _Answer]:
    """Return the answers of these hosts. Those that are not there in time are missing.

    Args:
        server: The connections to the hosts.
        kinds: The classes of the answers.
        hosts: The indices of the hosts; 0 for this one.
        names: The name of every host.
        interrupts: The signals of this process.
        own_answer: Returns this host's answer once it has one.

    Raises:
        JoinError: A host leaves.
        RendezvousInterrupted: On a signal. The other hosts receive it too.
    """
    found: dict[int, _Answer] = {}
    deadline = time.monotonic() + ANSWER_TIMEOUT_SECONDS
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        selector.register(interrupts, selectors.EVENT_READ)
        while (missing := set(hosts) - found.keys()) and time.monotonic() < deadline:
            selector.select(_POLL_SECONDS)
            if numbers := interrupts.read():
                server.broadcast(INTERRUPTED)
                raise RendezvousInterrupted(numbers[0])
            for event in server.poll(time.monotonic()):
                if isinstance(event, HostReported) and isinstance(event.message, kinds):
                    found[event.host] = event.message
                elif isinstance(event, HostDisconnected):
                    raise JoinError(
                        expected="all hosts to stay in the job until it starts",
                        found=f"{names[event.host]} left: {event.reason}",
                        fix="look at its terminal, or its agent's messages here; then start the job again",
                    )
            own = own_answer() if 0 in missing else None
            if own is not None:
                found[0] = own
    return found


@contextmanager
def announced_failures(server: ControlServer) -> Iterator[None]:
    """Send the other hosts an error that is raised within the context."""
    try:
        yield
    except RanklessError as error:
        server.broadcast(JoinRefused(expected=str(error.expected), found=str(error.found), fix=error.fix))
        raise

"""Host 0's end of the control channel: who has come, what they tell, and who is lost."""

import selectors
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from rankless.config.run_config import UNKNOWN_HOST
from rankless.launch.rendezvous.control_connection import ConnectionBrokenError, ControlConnection
from rankless.launch.rendezvous.host_facts import HostFacts
from rankless.launch.rendezvous.messages import (
    ControlMessage,
    Heartbeat,
    HostEnded,
    JoinRefused,
    JoinRequest,
    RecordingChunk,
    WorkerOutput,
    WorkerRecords,
)

BEAT_SECONDS = 1.0
SILENT_SECONDS = 4.0
"""Without a word from a host for so long, it is lost."""
PROVING_SECONDS = 10.0
LEAVING_SECONDS = 1.0
MOST_UNPROVEN = 64


@dataclass(frozen=True)
class HostJoined:
    """A host has come to the job."""

    host: int
    facts: HostFacts
    received_seconds: float
    """Host 0's clock then."""


@dataclass(frozen=True)
class HostReported:
    """A host tells what has happened there."""

    host: int
    frame: WorkerRecords | RecordingChunk | WorkerOutput | HostEnded


@dataclass(frozen=True)
class HostDisconnected:
    """A host's agent is gone, or silent."""

    host: int
    how: str


@dataclass(frozen=True)
class ConnectionRejected:
    """Somebody connected who is none of the job's hosts, or cannot prove it."""

    address: str
    why: str


ServerEvent = HostJoined | HostReported | HostDisconnected | ConnectionRejected


@dataclass(eq=False)
class _Connection:
    session: ControlConnection
    address: str
    heard: float
    host: int | None = None
    is_over: bool = False
    """Whether the host has told that it has ended."""
    writes: bool = field(default=False)


class ControlServer:
    """All connections of host 0. It is selectable; `turn` then tells what is new."""

    def __init__(self, listening: socket.socket, *, token: bytes, host_count: int) -> None:
        listening.setblocking(False)
        self._listening = listening
        self._token = token
        self._host_count = host_count
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ, None)
        self._connections: list[_Connection] = []
        self._beaten = 0.0

    def fileno(self) -> int:
        """What to select on, if the system has descriptors of selectors: else ask every now and then."""
        return self._selector.fileno()

    @property
    def present(self) -> frozenset[int]:
        """The other hosts that have come and are not lost."""
        return frozenset(item.host for item in self._connections if item.host is not None)

    @property
    def working(self) -> frozenset[int]:
        """Those of them that have not told that they have ended."""
        return frozenset(item.host for item in self._connections if item.host is not None and not item.is_over)

    def turn(self, now: float) -> list[ServerEvent]:
        """What has come since the last call; sends signs of life."""
        news: list[ServerEvent] = []
        ready = {key.data for key, _ in self._selector.select(0)}
        if None in ready:
            self._accept(now)
        for connection in list(self._connections):
            news += self._hear(connection, now, is_ready=connection in ready)
        if now - self._beaten >= BEAT_SECONDS:
            self._beaten = now
            self.tell_all(Heartbeat())
        return news

    def tell(self, host: int, frame: ControlMessage) -> None:
        """Send a frame to one host, if it is there."""
        for connection in self._connections:
            if connection.host == host:
                self._send(connection, frame)

    def tell_all(self, frame: ControlMessage) -> None:
        """Send a frame to every host that is there."""
        for connection in self._connections:
            if connection.host is not None:
                self._send(connection, frame)

    def close(self) -> None:
        """Close all connections, once the others have what was sent to them, or do not take it in time."""
        # Closing with something unread in it would reset a connection, and the other side might lose the last word.
        deadline = time.monotonic() + LEAVING_SECONDS
        waiting = [item for item in self._connections if item.host is not None]
        while waiting and time.monotonic() < deadline:
            waiting = [item for item in waiting if not item.session.has_ended()]
            time.sleep(0.002 if waiting else 0)
        for connection in list(self._connections):
            self._drop(connection)
        with suppress(KeyError):
            self._selector.unregister(self._listening)
        self._listening.close()
        self._selector.close()

    def _accept(self, now: float) -> None:
        unproven = [item for item in self._connections if item.host is None]
        try:
            accepted, address = self._listening.accept()
        except OSError:
            return
        if len(unproven) >= MOST_UNPROVEN:
            accepted.close()
            return
        session = ControlConnection(accepted, side="server", token=self._token)
        connection = _Connection(session, str(address[0]), now)
        self._connections.append(connection)
        self._selector.register(accepted, selectors.EVENT_READ, connection)

    def _hear(self, connection: _Connection, now: float, *, is_ready: bool) -> list[ServerEvent]:
        news: list[ServerEvent] = []
        try:
            for frame in connection.session.receive() if is_ready else ():
                connection.heard = now
                news += self._take(connection, frame)
            self._require_life(connection, now)
            self._watch_writing(connection)
        except ConnectionBrokenError as broken:
            if connection in self._connections:
                self._drop(connection)
                if connection.host is None:
                    news.append(ConnectionRejected(connection.address, str(broken)))
                elif not connection.is_over:
                    news.append(HostDisconnected(connection.host, str(broken)))
        return news

    def _take(self, connection: _Connection, frame: ControlMessage) -> list[ServerEvent]:
        if isinstance(frame, JoinRequest) and connection.host is None:
            return self._admit(connection, frame)
        if connection.host is None:
            raise ConnectionBrokenError("a frame out of order")
        if isinstance(frame, WorkerRecords | RecordingChunk | WorkerOutput | HostEnded):
            connection.is_over = connection.is_over or isinstance(frame, HostEnded)
            return [HostReported(connection.host, frame)]
        if not isinstance(frame, Heartbeat):
            raise ConnectionBrokenError("a frame out of order")
        return []

    def _admit(self, connection: _Connection, here: JoinRequest) -> list[ServerEvent]:
        refused = None
        if here.host == UNKNOWN_HOST:
            free = [place for place in range(1, self._host_count) if place not in self.present]
            here = msgspec.structs.replace(here, host=free[0] if free else self._host_count)
        if not 0 < here.host < self._host_count:
            refused = JoinRefused(
                expected=f"a host from 1 to {self._host_count - 1}",
                found=f"{here.facts.name} as host {here.host}",
                fix="start the job with the same hosts on every host; --host-rank counts from 0",
            )
        elif here.host in self.present:
            refused = JoinRefused(
                expected=f"one host {here.host}",
                found=f"{here.facts.name} from {connection.address} as a second one",
                fix="start the job once on each host; give each its own --host-rank",
            )
        if refused is not None:
            self._send(connection, refused)
            raise ConnectionBrokenError(refused.found)
        connection.host = here.host
        return [HostJoined(here.host, here.facts, time.time())]

    def _require_life(self, connection: _Connection, now: float) -> None:
        silent = now - connection.heard
        if connection.host is None and silent > PROVING_SECONDS:
            raise ConnectionBrokenError("no proof that it knows the job's token")
        if connection.host is not None and silent > SILENT_SECONDS:
            raise ConnectionBrokenError(f"no sign of life for {silent:.0f} s")

    def _send(self, connection: _Connection, frame: ControlMessage) -> None:
        # What is broken is found when it is listened to.
        with suppress(ConnectionBrokenError):
            connection.session.send(frame)
            self._watch_writing(connection)

    def _watch_writing(self, connection: _Connection) -> None:
        if connection.writes != connection.session.is_behind and connection in self._connections:
            connection.writes = connection.session.is_behind
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.writes else 0)
            self._selector.modify(connection.session, events, connection)

    def _drop(self, connection: _Connection) -> None:
        self._connections.remove(connection)
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection.session)
        connection.session.close()

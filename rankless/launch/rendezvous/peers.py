"""The other hosts of a run, as its watch sees them: none, those that this host leads, or the one that leads it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rankless.config.run_config import JobStart
from rankless.launch.rendezvous.control_client import LeaderConnection
from rankless.launch.rendezvous.control_connection import ConnectionBrokenError
from rankless.launch.rendezvous.control_server import ConnectionRejected, ControlServer, HostDisconnected, HostReported
from rankless.launch.rendezvous.messages import (
    HostEnded,
    JobEnded,
    RankStatusRequest,
    RecordingChunk,
    StopMode,
    StopWorkers,
    WorkerOutput,
    WorkerRecords,
)
from rankless.launch.rendezvous.recording_transfer import PIECE_BYTES, recorded, take_recorded
from rankless.launch.worker_output import Source
from rankless.records.events import AnyRecord, HostInterrupted, HostLost, Notice


@dataclass(frozen=True)
class PeerUpdate:
    """What the other hosts have told since the last time."""

    records: Sequence[AnyRecord] = ()
    stop: StopMode | None = None
    """Host 0 says so."""


class Peers(Protocol):
    """The other hosts of a run."""

    attributes_failures: bool
    """Whether this host judges who has failed."""

    def fileno(self) -> int | None:
        """What to select on; None if there is nothing."""
        ...

    def host_of(self, rank: int) -> int:
        """The place of a rank's host."""
        ...

    def turn(self, now: float) -> PeerUpdate:
        """What is new."""
        ...

    def report(self, records: Sequence[AnyRecord]) -> None:
        """Tell what has happened here."""
        ...

    def stop(self, how: StopMode) -> None:
        """Tell the others to end their workers."""
        ...

    def ask_where(self) -> None:
        """Ask the others where their ranks are: they tell it by records."""
        ...

    def is_asked_where(self) -> bool:
        """Whether host 0 has asked that since the last call."""
        ...

    def told_to_end(self, number: int) -> None:
        """Tell that a signal has told this host's agent to end."""
        ...

    def ended(self, ended: HostEnded) -> None:
        """Tell that nothing lives here any more."""
        ...

    @property
    def are_busy(self) -> bool:
        """Whether something of the job lives on another host."""
        ...


class NoPeers:
    """A run on one host."""

    attributes_failures = True

    def fileno(self) -> int | None:
        """Nothing."""
        return None

    def host_of(self, rank: int) -> int:  # noqa: ARG002  # the protocol's
        """There is one."""
        return 0

    def turn(self, now: float) -> PeerUpdate:  # noqa: ARG002  # the protocol's
        """Nothing."""
        return PeerUpdate()

    def report(self, records: Sequence[AnyRecord]) -> None:
        """Nobody hears it."""

    def stop(self, how: StopMode) -> None:
        """Nobody hears it."""

    def ask_where(self) -> None:
        """Nobody hears it."""

    def is_asked_where(self) -> bool:
        """Never."""
        return False

    def told_to_end(self, number: int) -> None:
        """Nobody hears it."""

    def ended(self, ended: HostEnded) -> None:
        """Nobody hears it."""

    @property
    def are_busy(self) -> bool:
        """Never."""
        return False


class FollowerPeers:
    """The hosts that host 0 leads."""

    attributes_failures = True

    def __init__(self, hub: ControlServer, start: JobStart, names: Sequence[str]) -> None:
        self._hub = hub
        self._start = start
        self._names = names
        self._show: Callable[[Source, bytes], None] = lambda _source, _data: None

    def hand_output_to(self, show: Callable[[Source, bytes], None]) -> None:
        """Give what workers of other hosts write to `show`."""
        self._show = show

    def host_of(self, rank: int) -> int:
        """The place of a rank's host."""
        return self._start.host_of(rank)

    def fileno(self) -> int | None:
        """The hub's."""
        return self._hub.fileno()

    def turn(self, now: float) -> PeerUpdate:
        """The records of all of them, and who is lost."""
        records: list[AnyRecord] = []
        for news in self._hub.turn(now):
            if isinstance(news, HostReported) and isinstance(news.frame, WorkerRecords):
                records += news.frame.records
            elif isinstance(news, HostReported) and isinstance(news.frame, RecordingChunk):
                take_recorded(news.frame, self._start)
            elif isinstance(news, HostReported) and isinstance(news.frame, WorkerOutput):
                self._show(news.frame.source, news.frame.data)
            elif isinstance(news, HostReported):
                assert isinstance(news.frame, HostEnded)
                records += self._end_of(news.host, news.frame)
            elif isinstance(news, HostDisconnected):
                records.append(self._lost(news.host, f"was lost: {news.how}"))
            elif isinstance(news, ConnectionRejected):
                text = f"somebody at {news.address} tried to join, and was turned away: {news.why}"
                records.append(Notice(rank=0, time_ns=time.monotonic_ns(), text=text))
        return PeerUpdate(records)

    def report(self, records: Sequence[AnyRecord]) -> None:
        """Host 0 hears it itself."""

    def stop(self, how: StopMode) -> None:
        """Tell all of them."""
        self._hub.tell_all(StopWorkers(how=how))

    def ask_where(self) -> None:
        """Ask all of them."""
        self._hub.tell_all(RankStatusRequest())

    def is_asked_where(self) -> bool:
        """Never: this host asks."""
        return False

    def told_to_end(self, number: int) -> None:
        """They are stopped; why is said at the end."""

    def ended(self, ended: HostEnded) -> None:
        """They need not know."""

    @property
    def are_busy(self) -> bool:
        """Whether one of them has not ended."""
        return bool(self._hub.working)

    def conclude(self, exit_code: int, texts: Sequence[str]) -> None:
        """Tell each host how the job ended."""
        for host, text in enumerate(texts):
            self._hub.tell(host, JobEnded(exit_code=exit_code, text=text))

    def _end_of(self, host: int, ended: HostEnded) -> list[AnyRecord]:
        if ended.interrupted_by is not None or not ended.parent_exit_code:
            return []
        words = f":\n{ended.last_words}" if ended.last_words else ""
        return [self._lost(host, f"could not see its workers to their end (exit code {ended.parent_exit_code}){words}")]

    def _lost(self, host: int, how: str) -> HostLost:
        first = self._start.first_rank(host)
        return HostLost(rank=first, time_ns=time.monotonic_ns(), host=self._names[host], how=how)


class LeaderPeer:
    """Host 0, which leads this one."""

    attributes_failures = False

    def __init__(self, uplink: LeaderConnection, start: JobStart, place: int, name: str) -> None:
        self._uplink = uplink
        self._start = start
        self._place = place
        self._name = name
        self.lost: str | None = None
        self.over: JobEnded | None = None
        self._is_asked_where = False

    def host_of(self, rank: int) -> int:
        """The place of a rank's host."""
        return self._start.host_of(rank)

    def fileno(self) -> int | None:
        """The connection's."""
        return None if self.lost is not None else self._uplink.fileno()

    def turn(self, now: float) -> PeerUpdate:
        """What host 0 wants."""
        if self.lost is not None:
            return PeerUpdate()
        stop: StopMode | None = None
        try:
            for frame in self._uplink.turn(now):
                if isinstance(frame, StopWorkers):
                    stop = frame.how
                elif isinstance(frame, RankStatusRequest):
                    self._is_asked_where = True
                elif isinstance(frame, JobEnded):
                    self.over = frame
        except ConnectionBrokenError as broken:
            self.lost = str(broken)
            stop = None if self.over is not None else "lost"
        return PeerUpdate(stop=stop)

    def report(self, records: Sequence[AnyRecord]) -> None:
        """Tell host 0."""
        if records:
            self._uplink.tell(WorkerRecords(records=tuple(records)))

    @property
    def is_behind(self) -> bool:
        """Whether host 0 has not taken all that it was sent."""
        return self._uplink.is_behind

    def show(self, source: Source, data: bytes) -> None:
        """Have host 0 show what a worker has written here."""
        for start in range(0, len(data), PIECE_BYTES):
            self._uplink.tell(WorkerOutput(source=source, data=data[start : start + PIECE_BYTES]))

    def stop(self, how: StopMode) -> None:
        """Not this host's to say."""

    def ask_where(self) -> None:
        """Not this host's to ask."""

    def is_asked_where(self) -> bool:
        """Whether host 0 has asked."""
        asked, self._is_asked_where = self._is_asked_where, False
        return asked

    def told_to_end(self, number: int) -> None:
        """Tell host 0 that this host's agent was, by a signal."""
        first = self._start.first_rank(self._place)
        record = HostInterrupted(rank=first, time_ns=time.monotonic_ns(), host=self._name, signal=number)
        self.report([record])

    def ended(self, ended: HostEnded) -> None:
        """Tell host 0 that nothing lives here any more, and give it what was recorded here."""
        for frame in recorded(self._start, self._place):
            self._uplink.tell(frame)
        self._uplink.tell(ended)

    @property
    def are_busy(self) -> bool:
        """Until host 0 has said how the job ended."""
        return self.over is None and self.lost is None

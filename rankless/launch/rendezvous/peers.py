"""The other hosts of a run, as its watch sees them: none, those that this host leads, or the one that leads it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rankless.config.run_config import JobStart
from rankless.launch.rendezvous.control_client import Uplink
from rankless.launch.rendezvous.control_connection import BrokenOff
from rankless.launch.rendezvous.control_server import Hub, Lost, Reported, Stranger
from rankless.launch.rendezvous.messages import Ended, Happened, How, Over, Recorded, Shown, Stop, WhereAreYou
from rankless.launch.rendezvous.recording_transfer import PIECE_BYTES, recorded, take_recorded
from rankless.launch.worker_output import Source
from rankless.records.events import AnyRecord, HostInterrupted, HostLost, Notice


@dataclass(frozen=True)
class Turn:
    """What the other hosts have told since the last time."""

    records: Sequence[AnyRecord] = ()
    stop: How | None = None
    """Host 0 says so."""


class Others(Protocol):
    """The other hosts of a run."""

    judges: bool
    """Whether this host judges who has failed."""

    def fileno(self) -> int | None:
        """What to select on; None if there is nothing."""
        ...

    def host_of(self, rank: int) -> int:
        """The place of a rank's host."""
        ...

    def turn(self, now: float) -> Turn:
        """What is new."""
        ...

    def report(self, records: Sequence[AnyRecord]) -> None:
        """Tell what has happened here."""
        ...

    def stop(self, how: How) -> None:
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

    def ended(self, ended: Ended) -> None:
        """Tell that nothing lives here any more."""
        ...

    @property
    def are_busy(self) -> bool:
        """Whether something of the job lives on another host."""
        ...


class SingleHost:
    """A run on one host."""

    judges = True

    def fileno(self) -> int | None:
        """Nothing."""
        return None

    def host_of(self, rank: int) -> int:  # noqa: ARG002  # the protocol's
        """There is one."""
        return 0

    def turn(self, now: float) -> Turn:  # noqa: ARG002  # the protocol's
        """Nothing."""
        return Turn()

    def report(self, records: Sequence[AnyRecord]) -> None:
        """Nobody hears it."""

    def stop(self, how: How) -> None:
        """Nobody hears it."""

    def ask_where(self) -> None:
        """Nobody hears it."""

    def is_asked_where(self) -> bool:
        """Never."""
        return False

    def told_to_end(self, number: int) -> None:
        """Nobody hears it."""

    def ended(self, ended: Ended) -> None:
        """Nobody hears it."""

    @property
    def are_busy(self) -> bool:
        """Never."""
        return False


class FollowerHost:
    """The hosts that host 0 leads."""

    judges = True

    def __init__(self, hub: Hub, start: JobStart, names: Sequence[str]) -> None:
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

    def turn(self, now: float) -> Turn:
        """The records of all of them, and who is lost."""
        records: list[AnyRecord] = []
        for news in self._hub.turn(now):
            if isinstance(news, Reported) and isinstance(news.frame, Happened):
                records += news.frame.records
            elif isinstance(news, Reported) and isinstance(news.frame, Recorded):
                take_recorded(news.frame, self._start)
            elif isinstance(news, Reported) and isinstance(news.frame, Shown):
                self._show(news.frame.source, news.frame.data)
            elif isinstance(news, Reported):
                assert isinstance(news.frame, Ended)
                records += self._end_of(news.host, news.frame)
            elif isinstance(news, Lost):
                records.append(self._lost(news.host, f"was lost: {news.how}"))
            elif isinstance(news, Stranger):
                text = f"somebody at {news.address} tried to join, and was turned away: {news.why}"
                records.append(Notice(rank=0, time_ns=time.monotonic_ns(), text=text))
        return Turn(records)

    def report(self, records: Sequence[AnyRecord]) -> None:
        """Host 0 hears it itself."""

    def stop(self, how: How) -> None:
        """Tell all of them."""
        self._hub.tell_all(Stop(how=how))

    def ask_where(self) -> None:
        """Ask all of them."""
        self._hub.tell_all(WhereAreYou())

    def is_asked_where(self) -> bool:
        """Never: this host asks."""
        return False

    def told_to_end(self, number: int) -> None:
        """They are stopped; why is said at the end."""

    def ended(self, ended: Ended) -> None:
        """They need not know."""

    @property
    def are_busy(self) -> bool:
        """Whether one of them has not ended."""
        return bool(self._hub.working)

    def conclude(self, exit_code: int, texts: Sequence[str]) -> None:
        """Tell each host how the job ended."""
        for host, text in enumerate(texts):
            self._hub.tell(host, Over(exit_code=exit_code, text=text))

    def _end_of(self, host: int, ended: Ended) -> list[AnyRecord]:
        if ended.interrupted_by is not None or not ended.parent_exit_code:
            return []
        words = f":\n{ended.last_words}" if ended.last_words else ""
        return [self._lost(host, f"could not see its workers to their end (exit code {ended.parent_exit_code}){words}")]

    def _lost(self, host: int, how: str) -> HostLost:
        first = self._start.first_rank(host)
        return HostLost(rank=first, time_ns=time.monotonic_ns(), host=self._names[host], how=how)


class LeaderHost:
    """Host 0, which leads this one."""

    judges = False

    def __init__(self, uplink: Uplink, start: JobStart, place: int, name: str) -> None:
        self._uplink = uplink
        self._start = start
        self._place = place
        self._name = name
        self.lost: str | None = None
        self.over: Over | None = None
        self._is_asked_where = False

    def host_of(self, rank: int) -> int:
        """The place of a rank's host."""
        return self._start.host_of(rank)

    def fileno(self) -> int | None:
        """The connection's."""
        return None if self.lost is not None else self._uplink.fileno()

    def turn(self, now: float) -> Turn:
        """What host 0 wants."""
        if self.lost is not None:
            return Turn()
        stop: How | None = None
        try:
            for frame in self._uplink.turn(now):
                if isinstance(frame, Stop):
                    stop = frame.how
                elif isinstance(frame, WhereAreYou):
                    self._is_asked_where = True
                elif isinstance(frame, Over):
                    self.over = frame
        except BrokenOff as broken:
            self.lost = str(broken)
            stop = None if self.over is not None else "lost"
        return Turn(stop=stop)

    def report(self, records: Sequence[AnyRecord]) -> None:
        """Tell host 0."""
        if records:
            self._uplink.tell(Happened(records=tuple(records)))

    @property
    def is_behind(self) -> bool:
        """Whether host 0 has not taken all that it was sent."""
        return self._uplink.is_behind

    def show(self, source: Source, data: bytes) -> None:
        """Have host 0 show what a worker has written here."""
        for start in range(0, len(data), PIECE_BYTES):
            self._uplink.tell(Shown(source=source, data=data[start : start + PIECE_BYTES]))

    def stop(self, how: How) -> None:
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

    def ended(self, ended: Ended) -> None:
        """Tell host 0 that nothing lives here any more, and give it what was recorded here."""
        for frame in recorded(self._start, self._place):
            self._uplink.tell(frame)
        self._uplink.tell(ended)

    @property
    def are_busy(self) -> bool:
        """Until host 0 has said how the job ended."""
        return self.over is None and self.lost is None

"""The hang watch: looks about every second, asks when a rank has stood still for unusually long, says what it finds."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from rankless.config.worker_config import WorkerConfig
from rankless.launch.rendezvous.peers import Others
from rankless.launch.watchdog.collective_timeouts import find_missing, timed_out
from rankless.launch.watchdog.diagnosis import Finding, find
from rankless.launch.watchdog.remote_ranks import Elsewhere
from rankless.launch.watchdog.report import headline, report
from rankless.launch.watchdog.stack_classifier import shown
from rankless.launch.watchdog.step_rate import Pace
from rankless.launch.watchdog.worker_monitor import Worker, write_stacks
from rankless.records.events import AnyRecord, Exited, HangDetected, Notice, Raised, RankStatus, ScriptFinished, Started
from rankless.records.quantities import timed
from rankless.records.worker_status import open_page

LONGEST_INTERVAL_SECONDS = 1.0
SHORTEST_INTERVAL_SECONDS = 0.1


def open_pages(count: int, *, timeout_seconds: float | None) -> list[int]:
    """The memory of as many workers; none where nothing is to be watched, or cannot be."""
    return [open_page() for _ in range(count)] if timeout_seconds != 0 and sys.platform == "linux" else []


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What is watched."""

    configs: Sequence[WorkerConfig]
    """This host's workers."""
    pages: Sequence[int]
    """Descriptors of their memory; none: nothing is watched."""
    timeout_seconds: float | None
    others: Others
    """The other hosts; if this one judges, it says what is found, and ends the job."""
    stacks_file: str
    """Where the stacks of all threads go."""
    host_name: Callable[[int], str] = lambda _rank: ""


class HangWatch:
    """Told of every record, and given a turn whenever the run is; returns records in its turn."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._configs = {config.rank: config for config in scene.configs}
        self._pages = {config.rank: page for config, page in zip(scene.configs, scene.pages, strict=False)}
        self._workers: dict[int, Worker] = {}
        self._ended: set[int] = set()
        size = scene.configs[0].world_size
        self._elsewhere = Elsewhere(scene.others, set(range(size)) - set(self._configs) if scene.others.judges else ())
        self._timed_out: dict[int, RankStatus] = {}
        self._is_asked = False
        """By host 0, or by the timeout of a rank."""
        self._pace = Pace()
        self._due = 0.0
        self._looking = False
        self._look_at = 0.0
        self._spoken_of = 0.0
        self._is_over = False

    def take(self, record: AnyRecord) -> None:
        """Note what a record tells of ranks."""
        if isinstance(record, Started) and record.rank in self._pages:
            config, page = self._configs[record.rank], self._pages[record.rank]
            self._workers[record.rank] = Worker(config, record.pid, page, time.monotonic())
        elif isinstance(record, ScriptFinished | Exited):
            self._ended.add(record.rank)
        elif isinstance(record, Raised) and (where := timed_out(record)) is not None:
            self._timed_out[record.rank] = where
            self._is_asked = True
        elif isinstance(record, RankStatus) and record.rank not in self._configs:
            self._elsewhere.take(record)
            if not record.asked and record.state != "moves":
                self._look_at = 0.0

    def turn(self, now: float) -> list[AnyRecord]:
        """What is to be told now."""
        if not self._workers or self._is_over:
            return []
        self._is_asked = self._scene.others.is_asked_where() or self._is_asked
        if self._looking:
            answered = [worker.is_answered(now) for worker in self._living()]  # of all: each may have more to be asked
            if not all(answered) or not self._elsewhere.is_answered(now, ended=self._ended):
                return []
            self._looking = False
            return list(self._conclude(now))
        if now < self._due and not self._is_asked:
            return []
        limit = self._limit
        self._due = now + min(LONGEST_INTERVAL_SECONDS, max(SHORTEST_INTERVAL_SECONDS, limit / 8))
        for worker in self._living():
            worker.feel(now)
        self._pace.see([worker.page for worker in self._workers.values()])
        still = self._still_seconds(now)
        if self._is_asked or (still >= self._limit and still >= self._look_at):
            self._look(now)
        elif still < self._limit:
            return list(self._go_on())
        return []

    def _look(self, now: float) -> None:
        for worker in self._living():
            worker.ask(now)
        self._elsewhere.ask(now)
        self._looking = True

    def close(self) -> None:
        """Let go of the memory."""
        for page in self._scene.pages:
            os.close(page)

    @property
    def _limit(self) -> float:
        """After how many seconds standing still is unusual."""
        timeout, limit = self._scene.timeout_seconds, self._pace.limit
        return limit if timeout is None else min(limit, timeout / 2)

    def _living(self) -> list[Worker]:
        return [worker for rank, worker in self._workers.items() if rank not in self._ended]

    def _still_seconds(self, now: float) -> float:
        """For how long some rank has stood still, and none has made a step."""
        still = [now - worker.pulse.still_since for worker in self._living() if not self._spins(worker)]
        spinning = [self._pace.silent_seconds(now) for worker in self._living() if self._spins(worker)]
        told = [where.still_seconds for where in self._elsewhere.told.values() if where.state == "waits"]
        return min(self._pace.silent_seconds(now), max([*still, *spinning, *told], default=0.0))

    def _spins(self, worker: Worker) -> bool:
        """Whether a wait of this rank's may not look like one: for a GPU, the CPU waits by asking again and again.
        Without a timeout of the user's nobody is asked for that: an evaluation looks the same.
        """
        return worker.config.device != "cpu" and self._pace.steps > 0 and self._scene.timeout_seconds is not None

    def _go_on(self) -> Iterator[AnyRecord]:
        """All is well, or well again."""
        self._look_at = 0.0
        if self._spoken_of:
            self._pace.endured(self._spoken_of)
            if self._scene.others.judges:
                yield _said(f"the job goes on, after {timed(self._spoken_of)}")
            else:
                for rank in self._configs:
                    yield RankStatus(rank=rank, time_ns=time.monotonic_ns(), state="moves")
        self._spoken_of = 0.0

    def _conclude(self, now: float) -> Iterator[AnyRecord]:
        limit, still = self._limit, self._still_seconds(now)
        self._look_at = self._next_look(still)
        own = self._own(now, gpu_waits=False)
        # That a GPU waits cannot be told from that it computes: it is believed if another rank is sure not to come.
        if any(where.state in ("blocked", "stopped", "debugged") for where in own.values()):
            own = self._own(now, gpu_waits=True)
        yield from (msgspec.structs.replace(where, asked=self._is_asked) for where in own.values())
        self._is_asked = False
        if not self._scene.others.judges:
            self._spoken_of = still
            write_stacks(self._scene.stacks_file, self._living())
        elif self._timed_out:
            yield from self._blame_missing(self._everyone(own))
        else:
            finding = find(self._everyone(own), seconds=still, steps=self._pace.steps, limit=limit)
            if finding is not None:
                yield self._verdict(finding, limit)

    def _blame_missing(self, everyone: Mapping[int, RankStatus]) -> Iterator[HangDetected]:
        finding = find_missing(everyone, self._timed_out)
        if finding is not None:
            self._is_over = True
            yield self._stuck(finding, more="; PyTorch's timeout was over")

    def _next_look(self, still: float) -> float:
        """After how long a standstill to look again; exactly when the user's timeout is over, for one."""
        timeout = self._scene.timeout_seconds
        return 2 * still if timeout is None or still >= timeout else min(2 * still, timeout)

    def _own(self, now: float, *, gpu_waits: bool) -> dict[int, RankStatus]:
        own = {}
        for rank, worker in self._workers.items():
            if rank in self._ended:
                doing = "goes on" if worker.lives else ""
                own[rank] = RankStatus(rank=rank, time_ns=time.monotonic_ns(), state="ended", doing=doing)
            else:
                own[rank] = worker.where(now, limit=self._limit, gpu_waits=gpu_waits)
        return own

    def _verdict(self, finding: Finding, limit: float) -> AnyRecord:
        end_after = finding.end_after(timeout=self._scene.timeout_seconds, limit=limit)
        # Who computes and writes output is alive, whatever it does.
        computing = [each.quiet_seconds for each in finding.culprits if each.state == "computes"]
        put_off = max((end_after - quiet for quiet in computing), default=0.0)
        stacks = write_stacks(self._scene.stacks_file, self._living(), self._elsewhere.told.values())
        if finding.seconds >= end_after and put_off <= 0:
            self._is_over = True
            return self._stuck(finding)
        self._spoken_of = finding.seconds
        self._look_at = min(self._look_at, max(end_after, finding.seconds + put_off))
        return _said(report(finding, self._pace, host_name=self._scene.host_name, stacks_file=stacks))

    def _stuck(self, finding: Finding, more: str = "") -> HangDetected:
        culprit = finding.culprits[0] if finding.culprits else finding.waiting[0]
        text = headline(finding, host_name=self._scene.host_name) + more
        trace = "\n".join(shown(culprit.stack))
        return HangDetected(rank=culprit.rank, time_ns=time.monotonic_ns(), headline=text, traceback=trace)

    def _everyone(self, own: Mapping[int, RankStatus]) -> dict[int, RankStatus]:
        """Every rank of the job; of those of which their host tells nothing is known that they run."""
        size = self._scene.configs[0].world_size
        everyone = {}
        for rank in range(size):
            state: RankStatus | None = own.get(rank) or self._elsewhere.told.get(rank)
            if rank in self._ended and rank not in own:
                state = RankStatus(rank=rank, time_ns=0, state="ended")
            unknown = RankStatus(rank=rank, time_ns=0, state="computes", text="a place that its host has not told")
            everyone[rank] = unknown if state is None or state.state == "moves" else state
        return everyone


def _said(text: str) -> Notice:
    return Notice(rank=0, time_ns=time.monotonic_ns(), text=text)

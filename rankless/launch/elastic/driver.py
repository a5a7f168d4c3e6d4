"""The driver of an elastic job: asks for hosts, starts workers, makes rounds of them, and says how it went."""

import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rankless.config.elastic import Elastic
from rankless.config.run_config import JobStart, RunConfig
from rankless.config.validation import choose_backend
from rankless.launch.elastic.all_workers import HERE, AllWorkers, LaunchContext
from rankless.launch.elastic.discovery import DiscoveredHosts, FixedHosts
from rankless.launch.elastic.member import Action, End, Start
from rankless.launch.elastic.membership import JobFailure, JobMembership
from rankless.launch.elastic.round_watchdog import RoundWatchdog
from rankless.launch.log_files import make_run_folder, make_run_id
from rankless.launch.profile import load_profile
from rankless.launch.signals import Interrupts
from rankless.launch.supervisor.failure_attribution import Verdict, attribute_failure, is_secondary_failure, name_signal
from rankless.launch.supervisor.supervisor import (
    INTERRUPT_GRACE_SECONDS,
    KILL_GRACE_SECONDS,
    POLL_SECONDS,
    STOP_GRACE_SECONDS,
)
from rankless.launch.supervisor.terminal_text import format_count, format_failure
from rankless.launch.worker_output import Source, Write
from rankless.records.elastic_messages import RoundStarted, StoreReady, WorkerMessage, WorkerReady
from rankless.records.events import (
    AnyRecord,
    Exited,
    HangDetected,
    HostLost,
    Notice,
    Raised,
    RankStatus,
    ScriptFinished,
)

TELL_AFTER_SECONDS = 5.0
"""So often it is said for whom a round waits."""


@dataclass(frozen=True, kw_only=True)
class DriverContext:
    """What a driver has of who has called it."""

    interrupts: Interrupts
    on_record: Callable[[AnyRecord], None]
    tell: Callable[[str], None]
    writes: Mapping[Source, Write]
    """What the terminal's two streams are written by."""


def run_elastic(config: RunConfig, elastic: Elastic, around: DriverContext) -> int:
    """Run an elastic job to its end and return its exit code. Nothing that it has started is alive afterwards."""
    with selectors.DefaultSelector() as selector:
        selector.register(around.interrupts, selectors.EVENT_READ)
        driver = Driver(config, elastic, around, selector)
        try:
            return driver.to_end()
        finally:
            driver.close()


class Driver:
    """One elastic job."""

    def __init__(
        self, config: RunConfig, elastic: Elastic, around: DriverContext, selector: selectors.BaseSelector
    ) -> None:
        self._config = config
        self._around = around
        self._selector = selector
        self._start = _job_start(config)
        self._folder = make_run_folder(config, self._start, 0)
        self._hosts = _hosts(config, elastic)
        self._roll = JobMembership(elastic, first_workers=config.worker_count)
        self._records: dict[int, list[AnyRecord]] = {}
        self._said: set[str] = set()
        self._told_awaited = 0.0
        self._standstill = RoundWatchdog(config.hang_timeout_seconds or elastic.stall_timeout_seconds)
        self._hosts_of: dict[int, str] = {}
        orders = LaunchContext(
            config=config,
            elastic=elastic,
            start=self._start,
            folder=self._folder,
            tell=around.tell,
            writes=around.writes,
        )
        self._crews = AllWorkers(orders, selector)
        most = elastic.max_workers
        upper = f" to {most}" if most is not None else " or more"
        around.tell(f"elastic job of {elastic.min_workers}{upper} workers, logs in {self._folder}")

    def to_end(self) -> int:
        """Go on until the job is over."""
        while True:
            now = time.monotonic()
            is_broken = self._crews.is_broken()  # before reading: what it sent before it ended is there now
            self._hear(now)
            for number in self._around.interrupts.read():
                self._end(number)
                self._around.tell(f"ended by {name_signal(number)}")
                return 128 + number
            if self._roll.is_finishing and not self._roll.workers and self._roll.trouble is None:
                self._end(signal.SIGTERM)
                return 0
            if is_broken:
                self._roll.trouble = JobFailure(headline="the process that starts the workers has ended")
            self._decide(now)
            if self._roll.trouble is not None:
                return self._fail(self._roll.trouble)
            self._selector.select(POLL_SECONDS)

    def close(self) -> None:
        """See to it that nothing is left."""
        self._crews.close()
        self._hosts.close()

    def _decide(self, now: float) -> None:
        slots = self._hosts.turn(now)
        trouble = self._hosts.trouble()
        if trouble is not None:
            self._say_once(f"the host discovery script does not answer as it should: {trouble}")
        if slots is not None:
            self._roll.hosts_are(slots, may_change=self._hosts.may_change)
        for action in self._roll.turn(now):
            self._perform(action)
        self._tell_what_is_awaited(now)
        self._look_for_standstill(now)

    def _look_for_standstill(self, now: float) -> None:
        seating = self._roll.seating
        if seating is None or seating.untold:
            return
        report = self._standstill.turn(seating.number, seating.assignments, self._hosts_of, now)
        if report is not None:
            self._around.tell(report.text)
            for number, why in report.culprits.items():
                self._crews.end(number, why)

    def _tell_what_is_awaited(self, now: float) -> None:
        awaited = self._roll.awaited()
        if awaited is None:
            return
        since, what = awaited
        if now - max(since, self._told_awaited) >= TELL_AFTER_SECONDS:
            self._told_awaited = now
            self._around.tell(f"{what}, {now - since:.0f} s")

    def _perform(self, action: Action) -> None:
        worker = action.worker
        if isinstance(action, Start):
            self._hosts_of[worker.number] = worker.host
            self._crews.start(worker)
            return
        if isinstance(action, End):
            self._crews.end(worker.number, action.why)
            return
        if isinstance(action.word, RoundStarted) and action.word.assignment.rank == 0:
            self._tell_of_round(action.word)
        self._crews.tell(worker.number, action.word, self._roll.seating)

    def _tell_of_round(self, begin: RoundStarted) -> None:
        seating = self._roll.seating
        assert seating is not None
        ranks = sorted(seating.assignments, key=lambda number: seating.assignments[number].rank)
        names = ", ".join(f"{number} ({self._roll.workers[number].host})" for number in ranks)
        self._around.tell(f"round {begin.round}: {format_count(len(ranks), 'worker')}, by rank: {names}")

    def _hear(self, now: float) -> None:
        for news in self._crews.turn():
            if isinstance(news, tuple):
                self._take_word(*news, now)
            else:
                self._take_record(news, now)

    def _take_word(self, number: int, word: WorkerMessage, now: float) -> None:
        if number not in self._roll.workers:
            return
        if isinstance(word, WorkerReady):
            self._roll.ready(number, word, now)
        elif isinstance(word, StoreReady):
            self._roll.serving(number, word.round, word.port)
        else:
            self._roll.synced(number, word.round)

    def _take_record(self, record: AnyRecord, now: float) -> None:
        self._around.on_record(record)
        if isinstance(record, RankStatus):
            self._standstill.take(record, now)
            return
        if isinstance(record, Notice):
            self._say_once(record.text)
        self._records.setdefault(record.rank, []).append(record)
        if record.rank not in self._roll.workers:
            return
        if isinstance(record, ScriptFinished) and record.exit_code == 0:
            self._roll.finishes(record.rank)
        elif isinstance(record, Exited):
            self._take_end(record, now)

    def _take_end(self, record: Exited, now: float) -> None:
        number = record.rank
        if record.exit_code == 0:
            self._standstill.finished(number, now)
            self._roll.finished(number)
            return
        self._standstill.forget(number)
        named, host = self._name(number), self._roll.workers[number].host
        records = self._records[number]
        lost = any(isinstance(each, Raised) and is_secondary_failure(each) for each in records)
        was_stuck = any(isinstance(each, HangDetected) for each in records)
        is_own = was_stuck or (record.exit_code > 0 and not lost)
        is_lost = any(isinstance(each, HostLost) for each in records)
        listed = self._roll.failed(number, now, is_own=is_own, is_lost=is_lost)
        if not is_lost:  # that is said of the host
            self._around.tell(f"{named} {self._verdict(number).headline}")
        if listed is not None:
            again = "for good" if listed == float("inf") else f"for {listed:g} s"
            self._around.tell(f"{host} gets no new workers {again}: they fail there again and again")

    def _name(self, number: int) -> str:
        worker = self._roll.workers[number]
        rank = f"rank {worker.last_rank} of round {worker.last_round}, " if worker.last_round else ""
        return f"worker {number} ({rank}{worker.host})"

    def _verdict(self, number: int) -> Verdict:
        """How a worker has failed."""
        found = attribute_failure(self._records.get(number, []))
        return found or Verdict(root_cause_rank=number, cause="lost", exit_code=1, headline="failed")

    def _fail(self, trouble: JobFailure) -> int:
        """End the job; returns its exit code."""
        self._end(signal.SIGTERM)
        if trouble.culprit is None:
            self._around.tell(f"the job was ended: {trouble.headline}")
            return 1
        verdict = self._verdict(trouble.culprit)
        profile = load_profile(self._config.launcher)
        files = profile.log_files(self._folder, trouble.culprit, 0)
        self._around.tell(f"the job was ended: {trouble.headline}; worker {trouble.culprit} failed last")
        text = format_failure(verdict, log_file=os.path.relpath(files.error or files.output))
        text += profile.failure_note(verdict.root_cause_rank, verdict.exit_code)
        self._around.writes["err"](text.encode())
        return verdict.exit_code

    def _end(self, number: int) -> None:
        """End the workers: politely, then at once."""
        grace = INTERRUPT_GRACE_SECONDS if number == signal.SIGINT else STOP_GRACE_SECONDS
        self._crews.signal(number)
        if not self._await_end(grace):
            self._crews.kill()
            self._await_end(KILL_GRACE_SECONDS)

    def _await_end(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            has_ended = self._crews.have_ended()
            for news in self._crews.turn():
                if not isinstance(news, tuple):
                    self._records.setdefault(news.rank, []).append(news)
                    self._around.on_record(news)
            if has_ended:
                return True
            if self._around.interrupts.read():
                return False
            self._selector.select(POLL_SECONDS / 5)
        return False

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._around.tell(text)


def _hosts(config: RunConfig, elastic: Elastic) -> DiscoveredHosts | FixedHosts:
    if elastic.discovery_script is not None:
        return DiscoveredHosts(elastic.discovery_script, slots_per_host=elastic.slots_per_host)
    slots: Mapping[str, int] = dict(elastic.hosts) or {"localhost": config.worker_count}
    return FixedHosts(slots)


def _job_start(config: RunConfig) -> JobStart:
    # Where the workers meet, each round says anew.
    return JobStart(
        run_id=make_run_id(config),
        seed=config.seed,
        workers=(config.worker_count,),
        backend=choose_backend(config.devices),
        master_address=HERE,
        master_port=0,
        store_address=HERE,
        store_port=0,
    )

"""The driver of an elastic job: it discovers hosts, starts workers, forms rounds and reports the result.

It detects a round without progress, finds the member for which the others wait, and decides whether to kill it. The
members are on several hosts. The agents of these hosts report the status of each member that makes no progress. The
round makes progress as long as one member does. `launch.watchdog.hang_verdict` finds the missing member, as in any
other job. Here the driver kills only that member, and a replacement continues from the last commit.

After some members have reached the end of the script, the others may take their time, but they are reported. There is
no next round for them, so the job fails if one is killed.
"""

import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from rankless.config.backend_and_fault_tolerance import choose_backend
from rankless.config.hosts_and_addresses import LOOPBACK
from rankless.config.run_config import AgreedJobConfig, Elastic, RunConfig
from rankless.extensions.horovodrun.elastic.all_workers import AllWorkers, LaunchContext
from rankless.extensions.horovodrun.elastic.discovery import DiscoveredHosts, FixedHosts
from rankless.launch.launcher_profile import LauncherProfile, make_run_folder, make_run_id
from rankless.launch.recovery.membership import Action, JobFailure, JobMembership, KillAction, StartAction
from rankless.launch.signal_reader import Interrupts, name_signal
from rankless.launch.supervisor.failure_attribution import attribute_failure, is_secondary_failure
from rankless.launch.supervisor.failure_report import format_failure
from rankless.launch.supervisor.supervisor import (
    KILL_GRACE_SECONDS,
    POLL_SECONDS,
    STOP_GRACE_SECONDS,
    choose_stop_times,
)
from rankless.launch.supervisor.verdict_types import Verdict
from rankless.launch.watchdog.hang_verdict import HangDiagnosis, diagnose
from rankless.launch.watchdog.phase_timeouts import STARTUP_STALL_SECONDS
from rankless.launch.watchdog.report import describe_status, describe_waiting
from rankless.launch.worker_output import Source, Write
from rankless.records.elastic_driver_protocol import (
    RankAssignment,
    RoundStarted,
    StateSynced,
    WorkerMessage,
    WorkerReady,
)
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
from rankless.records.number_formatting import format_count, format_ranks, format_seconds


@dataclass(frozen=True)
class StallReport:
    """The report on a round without progress."""

    text: str
    workers_to_kill: Mapping[int, str]
    """The reason for each worker to kill, by worker number."""


class StalledRoundDetector:
    """Collects the statuses of workers that make no progress.

    Without a timeout from the user, it kills a worker only if nothing in the round runs, and only after many minutes.
    """

    def __init__(self, timeout_seconds: float | None) -> None:
        self._timeout_seconds = timeout_seconds
        self._statuses: dict[int, tuple[RankStatus, float]] = {}
        self._round, self._round_start = 0, 0.0
        self._reported_seconds = 0.0

    def receive(self, status: RankStatus, now: float) -> None:
        """Process the status of a worker."""
        if status.state == "moves":
            self._statuses.pop(status.rank, None)
        else:
            self._statuses[status.rank] = status, now

    def forget(self, number: int) -> None:
        """Forget a worker that has failed."""
        self._statuses.pop(number, None)

    def mark_finished(self, number: int, now: float) -> None:
        """Note that a worker has ended with exit code 0."""
        self._statuses[number] = RankStatus(rank=number, time_ns=0, state="ended"), now

    def tick(
        self, round: int, assignments: Mapping[int, RankAssignment], hosts: Mapping[int, str], now: float
    ) -> StallReport | None:
        """Return a report if one is due: first after STARTUP_STALL_SECONDS, then each time the stall has doubled."""
        if round != self._round:
            self._round, self._round_start, self._reported_seconds = round, now, 0.0
        statuses = self._collect_statuses(assignments, now)
        if len(statuses) < len(assignments):
            self._reported_seconds = 0.0
            return None
        live = [status for status in statuses.values() if status.state != "ended"]
        if not live:
            return None
        stalled = min(status.idle_seconds for status in live)
        diagnosis = self._diagnose(statuses, stalled)
        if diagnosis is None:
            return None
        self._reported_seconds = stalled
        names = {each.rank: (number, hosts[number]) for number, each in assignments.items()}
        ended = sorted(status.rank for status in statuses.values() if status.state == "ended")
        return StallReport(
            _format_report(round, diagnosis, names, ended),
            self._choose_workers_to_kill(diagnosis, names, live, stalled, has_ended=bool(ended)),
        )

    def _diagnose(self, statuses: Mapping[int, RankStatus], stalled: float) -> HangDiagnosis | None:
        timeout = self._timeout_seconds
        minimum = STARTUP_STALL_SECONDS if timeout is None else min(STARTUP_STALL_SECONDS, timeout)
        has_reached_timeout = self._reported_seconds < (timeout or 0.0) <= stalled
        if stalled < max(minimum, 2 * self._reported_seconds) and not has_reached_timeout:
            return None
        return diagnose(statuses, seconds=stalled, stall_limit=minimum)

    def _choose_workers_to_kill(
        self,
        diagnosis: HangDiagnosis,
        names: Mapping[int, tuple[int, str]],
        live: Sequence[RankStatus],
        stalled: float,
        *,
        has_ended: bool,
    ) -> dict[int, str]:
        if stalled < diagnosis.abort_after(timeout=self._timeout_seconds, stall_limit=STARTUP_STALL_SECONDS):
            return {}
        if has_ended:
            reason = f"did not finish for {format_seconds(stalled)}, and others have"
            return {names[status.rank][0]: reason for status in live}
        if not diagnosis.waiting:  # killing all members would lose the state
            return {}
        reason = f"did not arrive while {describe_waiting(diagnosis)} for {format_seconds(stalled)}"
        return {names[status.rank][0]: reason for status in diagnosis.missing}

    def _collect_statuses(self, assignments: Mapping[int, RankAssignment], now: float) -> dict[int, RankStatus]:
        """Return the statuses of the members without progress, by rank.

        A status from before the round describes the wait for the round, so it does not count.
        """
        statuses = {}
        for number, assignment in assignments.items():
            status, received_at = self._statuses.get(number, (None, 0.0))
            if status is not None and received_at >= self._round_start:
                still = min(status.idle_seconds + now - received_at, now - self._round_start)
                statuses[assignment.rank] = msgspec.structs.replace(status, rank=assignment.rank, idle_seconds=still)
        return statuses


def _format_report(
    round: int, diagnosis: HangDiagnosis, names: Mapping[int, tuple[int, str]], ended: Sequence[int]
) -> str:
    waiting = [describe_waiting(diagnosis)] if diagnosis.waiting or not ended else []
    how = "; ".join([*waiting, *([f"{format_ranks(ended)} ended"] if ended else [])])
    lines = [f"round {round} has made no progress for {format_seconds(diagnosis.seconds)}: {how}"]
    for status in diagnosis.missing:
        if status.state != "ended":
            number, host = names[status.rank]
            lines.append(f"  rank {status.rank}, worker {number} on {host}: {describe_status(status)}")
    return "\n".join(lines)


PROGRESS_SECONDS = 5.0
"""How often the driver reports what a round waits for."""


@dataclass(frozen=True, kw_only=True)
class DriverContext:
    """What the agent gives the driver."""

    profile: LauncherProfile
    interrupts: Interrupts
    on_record: Callable[[AnyRecord], None]
    notify: Callable[[str], None]
    writes: Mapping[Source, Write]
    """The functions that write to the terminal's two streams."""


def run_elastic(config: RunConfig, elastic: Elastic, context: DriverContext) -> int:
    """Run an elastic job to its end and return its exit code. No process of the job is alive afterwards."""
    with selectors.DefaultSelector() as selector:
        selector.register(context.interrupts, selectors.EVENT_READ)
        driver = ElasticDriver(config, elastic, context, selector)
        try:
            return driver.run()
        finally:
            driver.close()


class ElasticDriver:
    """One elastic job."""

    def __init__(
        self, config: RunConfig, elastic: Elastic, context: DriverContext, selector: selectors.BaseSelector
    ) -> None:
        self._config = config
        self._context = context
        self._selector = selector
        self._start = _make_agreed_job_config(config, context.profile)
        self._folder = make_run_folder(config, context.profile, self._start, 0)
        self._hosts = _make_hosts(config, elastic)
        self._membership = JobMembership(elastic, first_workers=config.worker_count)
        self._records: dict[int, list[AnyRecord]] = {}
        self._notified: set[str] = set()
        self._last_progress_at = 0.0
        self._stall_detector = StalledRoundDetector(config.hang_timeout_seconds or elastic.stall_timeout_seconds)
        self._host_names: dict[int, str] = {}
        launch_context = LaunchContext(
            config=config,
            profile=context.profile,
            elastic=elastic,
            start=self._start,
            folder=self._folder,
            notify=context.notify,
            writes=context.writes,
        )
        self._workers = AllWorkers(launch_context, selector)
        maximum = f" to {elastic.max_workers}" if elastic.max_workers is not None else " or more"
        context.notify(f"elastic job of {elastic.min_workers}{maximum} workers, logs in {self._folder}")

    def run(self) -> int:
        """Run the job to its end and return its exit code."""
        while True:
            now = time.monotonic()
            is_broken = self._workers.is_broken()  # before reading: its last records have arrived by then
            self._process_events(now)
            for number in self._context.interrupts.read():
                self._end_workers(number, choose_stop_times(self._config, self._context.profile).grace_seconds)
                self._context.notify(f"ended by {name_signal(number)}")
                return 128 + number
            if self._membership.is_finishing and not self._membership.workers and self._membership.failure is None:
                self._end_workers(signal.SIGTERM)
                return 0
            if is_broken:
                self._membership.failure = JobFailure(headline="the process that starts the workers has ended")
            self._advance(now)
            if self._membership.failure is not None:
                return self._fail(self._membership.failure)
            self._selector.select(POLL_SECONDS)

    def close(self) -> None:
        """End all processes of the job."""
        self._workers.close()
        self._hosts.close()

    def _advance(self, now: float) -> None:
        slots = self._hosts.poll(now)
        warning = self._hosts.warning
        if warning is not None:
            self._notify_once(f"the host discovery script failed: {warning}")
        if slots is not None:
            self._membership.set_hosts(slots, may_change=self._hosts.may_change)
        for action in self._membership.decide(now):
            self._perform(action)
        self._report_waiting(now)
        self._check_progress(now)

    def _check_progress(self, now: float) -> None:
        current = self._membership.current_round
        if current is None:
            return
        report = self._stall_detector.tick(current.number, current.assignments, self._host_names, now)
        if report is not None:
            self._context.notify(report.text)
            for number, reason in report.workers_to_kill.items():
                self._workers.kill_if_stalled(number, reason)

    def _report_waiting(self, now: float) -> None:
        waiting = self._membership.describe_waiting()
        if waiting is None:
            return
        since, what = waiting
        if now - max(since, self._last_progress_at) >= PROGRESS_SECONDS:
            self._last_progress_at = now
            self._context.notify(f"{what}, {now - since:.0f} s")

    def _perform(self, action: Action) -> None:
        worker = action.worker
        if isinstance(action, StartAction):
            self._host_names[worker.number] = worker.host
            self._workers.start(worker)
            return
        if isinstance(action, KillAction):
            self._workers.kill_if_stalled(worker.number, action.reason)
            return
        if isinstance(action.message, RoundStarted) and action.message.assignment.rank == 0:
            self._report_round(action.message)
        self._workers.send(worker.number, action.message, self._membership.current_round)

    def _report_round(self, message: RoundStarted) -> None:
        current = self._membership.current_round
        assert current is not None
        by_rank = sorted(current.assignments, key=lambda number: current.assignments[number].rank)
        names = ", ".join(f"{number} ({self._membership.workers[number].host})" for number in by_rank)
        self._context.notify(f"round {message.round}: {format_count(len(by_rank), 'worker')}, by rank: {names}")

    def _process_events(self, now: float) -> None:
        for event in self._workers.poll():
            if isinstance(event, tuple):
                self._process_message(*event, now)
            else:
                self._process_record(event, now)

    def _process_message(self, number: int, message: WorkerMessage, now: float) -> None:
        if number not in self._membership.workers:
            return
        if isinstance(message, WorkerReady):
            self._membership.mark_ready(number, message, now)
        elif isinstance(message, StateSynced):
            self._membership.mark_synced(number, message.round)

    def _process_record(self, record: AnyRecord, now: float) -> None:
        self._context.on_record(record)
        if isinstance(record, RankStatus):
            self._stall_detector.receive(record, now)
            return
        if isinstance(record, Notice):
            self._notify_once(record.text)
        self._records.setdefault(record.rank, []).append(record)
        if record.rank not in self._membership.workers:
            return
        if isinstance(record, ScriptFinished) and record.exit_code == 0:
            self._membership.mark_finishing(record.rank)
        elif isinstance(record, Exited):
            self._process_exit(record, now)

    def _process_exit(self, record: Exited, now: float) -> None:
        number = record.rank
        if record.exit_code == 0:
            self._stall_detector.mark_finished(number, now)
            self._membership.remove_finished(number)
            return
        self._stall_detector.forget(number)
        name, host = self._name_worker(number), self._membership.workers[number].host
        records = self._records[number]
        is_secondary = any(isinstance(each, Raised) and is_secondary_failure(each) for each in records)
        has_hung = any(isinstance(each, HangDetected) for each in records)
        is_own = has_hung or (record.exit_code > 0 and not is_secondary)
        is_lost = any(isinstance(each, HostLost) for each in records)
        listed_seconds = self._membership.remove_failed(number, now, is_own=is_own, is_lost=is_lost)
        if not is_lost:  # the report on the lost host names the worker
            self._context.notify(f"{name} {self._attribute_failure(number).headline}")
        if listed_seconds is not None:
            duration = "permanently" if listed_seconds == float("inf") else f"for {listed_seconds:g} s"
            self._context.notify(f"host {host} is blacklisted {duration}, because workers fail there repeatedly")

    def _name_worker(self, number: int) -> str:
        worker = self._membership.workers[number]
        rank = f"rank {worker.last_rank} of round {worker.last_round}, " if worker.last_round else ""
        return f"worker {number} ({rank}{worker.host})"

    def _attribute_failure(self, number: int) -> Verdict:
        """Return the verdict on a worker that has failed."""
        verdict = attribute_failure(self._records.get(number, []))
        return verdict or Verdict(root_cause_rank=number, cause="lost", exit_code=1, headline="failed")

    def _fail(self, failure: JobFailure) -> int:
        """End the job as failed and return its exit code."""
        self._end_workers(signal.SIGTERM)
        if failure.worker is None:
            self._context.notify(f"the job was ended: {failure.headline}")
            return 1
        verdict = self._attribute_failure(failure.worker)
        profile = self._context.profile
        files = profile.log_files(self._folder, failure.worker, 0)
        self._context.notify(f"the job was ended: {failure.headline}; worker {failure.worker} failed last")
        text = format_failure(verdict, log_file=os.path.relpath(files.error or files.output))
        text += profile.failure_note(verdict.root_cause_rank, verdict.exit_code)
        self._context.writes["err"](text.encode(errors="backslashreplace"))
        return verdict.exit_code

    def _end_workers(self, number: int, grace_seconds: float = STOP_GRACE_SECONDS) -> None:
        """End the workers with a signal, and kill them after the grace period."""
        self._workers.signal(number)
        if not self._wait_for_end(grace_seconds):
            self._workers.kill()
            self._wait_for_end(KILL_GRACE_SECONDS)

    def _wait_for_end(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            have_ended = self._workers.have_ended()
            for event in self._workers.poll():
                if not isinstance(event, tuple):
                    self._records.setdefault(event.rank, []).append(event)
                    self._context.on_record(event)
            if have_ended:
                return True
            if self._context.interrupts.read():
                return False
            self._selector.select(POLL_SECONDS / 5)
        return False

    def _notify_once(self, text: str) -> None:
        if text not in self._notified:
            self._notified.add(text)
            self._context.notify(text)


def _make_hosts(config: RunConfig, elastic: Elastic) -> DiscoveredHosts | FixedHosts:
    if elastic.discovery_script is not None:
        return DiscoveredHosts(elastic.discovery_script, slots_per_host=elastic.slots_per_host)
    slots: Mapping[str, int] = dict(elastic.hosts) or {"localhost": config.worker_count}
    return FixedHosts(slots)


def _make_agreed_job_config(config: RunConfig, profile: LauncherProfile) -> AgreedJobConfig:
    # The start of each round says where its store is, so the addresses here are placeholders.
    return AgreedJobConfig(
        run_id=make_run_id(profile),
        seed=config.seed,
        workers=(config.worker_count,),
        backend=choose_backend([config.devices], config.backend).name,
        master_address=LOOPBACK,
        master_port=0,
        store_address=LOOPBACK,
        store_port=0,
    )

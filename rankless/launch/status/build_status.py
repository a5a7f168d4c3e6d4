"""The status of a run: of two readings of a run in progress, or of the summary of one that has ended."""

import time
from collections.abc import Callable

import msgspec

from rankless.launch.status.read_counters import ProcessReading, RoleProcessReading, RunReading, WorkerReading
from rankless.launch.watchdog.process_activity import MAX_IDLE_CPU_FRACTION, MAX_SWITCHES_PER_SECOND
from rankless.records.live_run import LiveRun, LiveWorker, ProcessRow
from rankless.records.run_json_format import RunSummary
from rankless.records.run_status import (
    RunStatus,
    ServerReport,
    ServerState,
    StatusOutcome,
    WorkerReport,
    WorkerState,
)
from rankless.records.server_traffic_counters import ServerActivity
from rankless.records.worker_status import WorkerStatus

RATE_SECONDS = 10.0
"""The period before the last step over which steps per second are counted."""
PUBLISH_SECONDS = 0.25
"""How old what a busy process has published may be."""
_TICK_SECONDS = 0.015
"""How far the kernel's counters of CPU time may be off."""


def report_running(before: RunReading | None, after: RunReading) -> RunStatus:
    """Return the status of a run in progress.

    Args:
        before: An earlier reading of the same run; None if there is none.
        after: The present reading.
    """
    run = after.run
    lead = min((rank for rank, worker in after.workers.items() if worker.page is not None), default=None)
    page = None if lead is None else after.workers[lead].page
    return RunStatus(
        run_id=run.run_id,
        log_folder=run.log_folder,
        outcome="running",
        verdict="",
        exit_code=None,
        started=run.started,
        seconds=time.monotonic() - run.started_monotonic,
        agent_process_id=run.process_id,
        host=run.host_names[run.host],
        worker_count=len(run.workers),
        server_count=sum(run.process_counts.values()),
        process_counts=run.process_counts,
        steps=None if page is None else page.job_steps or page.count,
        samples_per_second=None if page is None or lead != 0 else _samples_per_second(page, after.monotonic),
        workers=tuple(_report_worker(run, each, before, after) for each in run.workers),
        servers=tuple(_report_process(each, before, after) for each in run.processes),
        lost_hosts=run.lost_hosts,
        slow_ranks=run.slow_ranks,
    )


def report_ended(summary: RunSummary, *, outcome: StatusOutcome, verdict: str) -> RunStatus:
    """Return the status of a run that has ended, or of which this host knows nothing else.

    Args:
        summary: Its `run.json`.
        outcome: How it ended.
        verdict: The same as a sentence.
    """
    return RunStatus(
        run_id=summary.log_folder.rstrip("/").rpartition("/")[2],
        log_folder=summary.log_folder,
        outcome=outcome,
        verdict=verdict,
        exit_code=summary.exit_code,
        started=summary.started,
        seconds=summary.seconds,
        agent_process_id=None,
        host="",
        worker_count=summary.workers,
        server_count=sum(each.count for each in summary.processes),
        process_counts={each.role: each.count for each in summary.processes},
        steps=summary.steps,
        samples_per_second=summary.samples_per_second,
        workers=tuple(
            WorkerReport(
                rank=each.rank,
                host=each.host,
                device=each.device,
                log_file=each.log_file,
                process_id=None,
                state="elsewhere" if outcome == "unknown" else "ended",
                exit_code=each.exit_code,
                memory_bytes=each.peak_memory_bytes,
            )
            for each in summary.ranks
        ),
        servers=(),
        lost_hosts=summary.lost_hosts,
    )


def report_gone(run: LiveRun) -> RunStatus:
    """Return the status of a run that has just ended and has left no `run.json`: its launcher writes none."""
    gone = RunReading(run=run, monotonic=time.monotonic(), workers={}, processes={})
    verdict = "it has ended, and its launcher writes no run.json"
    return msgspec.structs.replace(
        report_running(None, gone), outcome="unknown", verdict=verdict, agent_process_id=None, workers=(), servers=()
    )


def measure_step_rate(before: WorkerStatus | None, after: WorkerStatus, now: float) -> float | None:
    """Return a worker's steps per second: over the time between two readings if it has many steps, else over the last.

    Args:
        before: An earlier status of the worker; None if there is none.
        after: Its present status.
        now: `time.monotonic()` of that.

    Returns:
        None before the second step. A worker that makes no step for long has a rate that falls to 0.
    """
    if after.last is None or after.count < 2:
        return None
    recent = [each for each in after.step_times if after.last - RATE_SECONDS <= each <= after.last]
    if len(recent) < 2:  # a step takes longer than the period
        recent = list(after.step_times[-2:])
    steps, seconds = len(recent) - 1, recent[-1] - recent[0]
    if before is not None and before.last is not None and after.count - before.count > steps:
        steps, seconds = after.count - before.count, after.last - before.last
    if steps < 1 or seconds <= 0:
        return None
    return steps / (seconds + _overdue_seconds(seconds / steps, now - after.last))


def _overdue_seconds(step_seconds: float, since_step: float) -> float:
    """Return by how much a pause exceeds two steps; 0 for a pause that may be a step."""
    return since_step if since_step > 2 * step_seconds + PUBLISH_SECONDS else 0.0


def _samples_per_second(page: WorkerStatus, now: float) -> float | None:
    """Return the rate that rank 0 has published, which falls to 0 if no step follows."""
    if not page.samples_per_second or page.last is None:
        return None
    rate = measure_step_rate(None, page, page.last)
    fallen = measure_step_rate(None, page, now)
    return page.samples_per_second * (fallen / rate if rate and fallen else 1.0)


def _report_worker(run: LiveRun, worker: LiveWorker, before: RunReading | None, after: RunReading) -> WorkerReport:
    reading = after.workers.get(worker.rank)
    report = WorkerReport(
        rank=worker.rank,
        host=run.host_names[worker.host],
        device=worker.device,
        log_file=worker.log_file,
        process_id=worker.process_id,
        state=_state_without_reading(run, worker),
        exit_code=worker.exit_code,
    )
    if reading is None:
        return report
    earlier = None if before is None else before.workers.get(worker.rank)
    page, process = reading.page, reading.process
    return msgspec.structs.replace(
        report,
        state=_worker_state(earlier, reading, _seconds_between(before, after)),
        steps=None if page is None else page.count,
        steps_per_second=None
        if page is None
        else measure_step_rate(None if earlier is None else earlier.page, page, after.monotonic),
        seconds_since_step=None if page is None or page.last is None else max(0.0, after.monotonic - page.last),
        memory_bytes=None if process is None else process.memory_bytes,
        cpu_percent=_cpu_percent(
            None if earlier is None else earlier.process, process, _seconds_between(before, after)
        ),
        operation="" if worker.has_finished else reading.location.collective,
        place="the end of its script" if worker.has_finished else reading.location.text,
    )


def _state_without_reading(run: LiveRun, worker: LiveWorker) -> WorkerState:
    if worker.exit_code is not None:
        return "ended"
    return "elsewhere" if worker.host != run.host else "starting"


def _worker_state(before: WorkerReading | None, after: WorkerReading, seconds: float) -> WorkerState:
    process, location = after.process, after.location
    if process is None or process.stats.state in "ZX":
        return "ended"
    if process.stats.tracer_pid or process.stats.state == "t" or location.is_debugged:
        return "debugged"
    if process.stats.state == "T":
        return "stopped"
    if location.collective:
        return "waits"
    return "idle" if _is_idle(None if before is None else before.process, process, seconds) else "computes"


def _is_idle(before: ProcessReading | None, after: ProcessReading, seconds: float) -> bool:
    if after.stats.state in "RD" or before is None:
        return False
    cpu = after.stats.cpu_seconds - before.stats.cpu_seconds
    switches = after.stats.context_switches - before.stats.context_switches
    return cpu <= MAX_IDLE_CPU_FRACTION * seconds + _TICK_SECONDS and switches <= MAX_SWITCHES_PER_SECOND * seconds + 2


def _cpu_percent(before: ProcessReading | None, after: ProcessReading | None, seconds: float) -> float | None:
    if before is None or after is None or seconds <= 0:
        return None
    return max(0.0, 100.0 * (after.stats.cpu_seconds - before.stats.cpu_seconds) / seconds)


def _report_process(live: ProcessRow, before: RunReading | None, after: RunReading) -> ServerReport:
    name = (live.role, live.index)
    reading = after.processes[name]
    earlier = None if before is None else before.processes.get(name)
    process, seconds = reading.process, _seconds_between(before, after)
    rate = _make_process_rate(None if before is None else before.monotonic, earlier, reading)
    return ServerReport(
        role=live.role,
        index=live.index,
        address=live.address,
        log_file=live.log_file,
        process_id=live.process_id,
        state=_process_state(live, process),
        restarts=live.restarts,
        copy_of=live.copy_of,
        memory_bytes=None if process is None else process.memory_bytes,
        cpu_percent=_cpu_percent(None if earlier is None else earlier.process, process, seconds),
        transactions_per_second=rate(lambda each: each.transactions),
        requests_per_second=rate(lambda each: each.requests),
        pulled_rows_per_second=rate(lambda each: each.pulled_rows),
        pulled_bytes_per_second=rate(lambda each: each.pulled_bytes),
        pushed_rows_per_second=rate(lambda each: each.pushed_rows),
        pushed_bytes_per_second=rate(lambda each: each.pushed_bytes),
        activity=reading.activity,
    )


def _make_process_rate(
    earlier_at: float | None, earlier: RoleProcessReading | None, reading: RoleProcessReading
) -> Callable[[Callable[[ServerActivity], int]], float | None]:
    """Return a function from a counter to its rate. Counters of different processes have none."""
    old, new = None if earlier is None else earlier.activity, reading.activity

    def rate(counter: Callable[[ServerActivity], int]) -> float | None:
        if old is None or new is None or earlier_at is None or old.process_id != new.process_id:
            return None
        # What an idle process has published long ago holds until it does something.
        seconds = new.monotonic - max(old.monotonic, earlier_at - PUBLISH_SECONDS)
        return max(0, counter(new) - counter(old)) / seconds if seconds > 0 and new != old else 0.0

    return rate


def _process_state(live: ProcessRow, process: ProcessReading | None) -> ServerState:
    if live.stage in ("ended", "restarting") or process is None or process.stats.state in "ZX":
        return "restarting" if live.stage == "restarting" else "ended"
    if process.stats.tracer_pid or process.stats.state == "t":
        return "debugged"
    return "stopped" if process.stats.state == "T" else "starting" if live.stage == "starting" else "serves"


def _seconds_between(before: RunReading | None, after: RunReading) -> float:
    return 0.0 if before is None else after.monotonic - before.monotonic

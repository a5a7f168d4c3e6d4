"""The hang watch: looks about every second, asks when a rank has stood still for unusually long, says what it finds."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from rankless.config.worker_config import WorkerConfig
from rankless.launch.rendezvous.peers import Others
from rankless.launch.watchdog.collective_timeouts import find_missing, parse_timeout
from rankless.launch.watchdog.diagnosis import HangDiagnosis, diagnose
from rankless.launch.watchdog.remote_ranks import RemoteRanks
from rankless.launch.watchdog.report import format_headline, format_report
from rankless.launch.watchdog.stack_classifier import truncate_stack
from rankless.launch.watchdog.step_rate import StepRate
from rankless.launch.watchdog.worker_monitor import WorkerMonitor, write_stacks
from rankless.records.events import AnyRecord, Exited, HangDetected, Notice, Raised, RankStatus, ScriptFinished, Started
from rankless.records.quantities import timed
from rankless.records.worker_status import open_page

LONGEST_INTERVAL_SECONDS = 1.0
SHORTEST_INTERVAL_SECONDS = 0.1


def open_status_pages(count: int, *, timeout_seconds: float | None) -> list[int]:
    """The memory of as many workers; none where nothing is to be watched, or cannot be."""
    return [open_page() for _ in range(count)] if timeout_seconds != 0 and sys.platform == "linux" else []


@dataclass(frozen=True, kw_only=True)
class WatchdogConfig:
    """What is watched."""

    worker_configs: Sequence[WorkerConfig]
    """This host's workers."""
    pages: Sequence[int]
    """Descriptors of their memory; none: nothing is watched."""
    timeout_seconds: float | None
    others: Others
    """The other hosts; if this one judges, it says what is found, and ends the job."""
    stacks_file: str
    """RankStatus the stacks of all threads go."""
    host_name: Callable[[int], str] = lambda _rank: ""


class Watchdog:
    """Told of every record, and given a turn whenever the run is; returns records in its turn."""

    def __init__(self, config: WatchdogConfig) -> None:
        self._config = config
        self._worker_configs = {each.rank: each for each in config.worker_configs}
        self._pages = {each.rank: page for each, page in zip(config.worker_configs, config.pages, strict=False)}
        self._workers: dict[int, WorkerMonitor] = {}
        self._ended: set[int] = set()
        size = config.worker_configs[0].world_size
        self._remote_ranks = RemoteRanks(
            config.others, set(range(size)) - set(self._worker_configs) if config.others.judges else ()
        )
        self._timed_out: dict[int, RankStatus] = {}
        self._is_requested = False
        """By host 0, or by the timeout of a rank."""
        self._step_rate = StepRate()
        self._next_update_at = 0.0
        self._is_collecting = False
        self._next_check_at = 0.0
        self._reported_seconds = 0.0
        self._is_finished = False

    def receive(self, record: AnyRecord) -> None:
        """Note what a record tells of ranks."""
        if isinstance(record, Started) and record.rank in self._pages:
            config, page = self._worker_configs[record.rank], self._pages[record.rank]
            self._workers[record.rank] = WorkerMonitor(config, record.pid, page, time.monotonic())
        elif isinstance(record, ScriptFinished | Exited):
            self._ended.add(record.rank)
        elif isinstance(record, Raised) and (where := parse_timeout(record)) is not None:
            self._timed_out[record.rank] = where
            self._is_requested = True
        elif isinstance(record, RankStatus) and record.rank not in self._worker_configs:
            self._remote_ranks.receive(record)
            if not record.asked and record.state != "moves":
                self._next_check_at = 0.0

    def tick(self, now: float) -> list[AnyRecord]:
        """What is to be told now."""
        if not self._workers or self._is_finished:
            return []
        self._is_requested = self._config.others.is_asked_where() or self._is_requested
        if self._is_collecting:
            completed = [
                worker.is_complete(now) for worker in self._live_workers()
            ]  # of all: each may have more to be asked
            if not all(completed) or not self._remote_ranks.is_complete(now, ended=self._ended):
                return []
            self._is_collecting = False
            return list(self._diagnose(now))
        if now < self._next_update_at and not self._is_requested:
            return []
        stall_limit = self._stall_limit
        self._next_update_at = now + min(LONGEST_INTERVAL_SECONDS, max(SHORTEST_INTERVAL_SECONDS, stall_limit / 8))
        for worker in self._live_workers():
            worker.update(now)
        self._step_rate.update([worker.page for worker in self._workers.values()])
        stalled = self._stalled_seconds(now)
        if self._is_requested or (stalled >= self._stall_limit and stalled >= self._next_check_at):
            self._start_collecting(now)
        elif stalled < self._stall_limit:
            return list(self._report_recovery())
        return []

    def _start_collecting(self, now: float) -> None:
        for worker in self._live_workers():
            worker.request_stacks(now)
        self._remote_ranks.request_statuses(now)
        self._is_collecting = True

    def close(self) -> None:
        """Let go of the memory."""
        for page in self._config.pages:
            os.close(page)

    @property
    def _stall_limit(self) -> float:
        """After how many seconds standing still is unusual."""
        timeout, stall_limit = self._config.timeout_seconds, self._step_rate.stall_limit
        return stall_limit if timeout is None else min(stall_limit, timeout / 2)

    def _live_workers(self) -> list[WorkerMonitor]:
        return [worker for rank, worker in self._workers.items() if rank not in self._ended]

    def _stalled_seconds(self, now: float) -> float:
        """For how long some rank has stood still, and none has made a step."""
        stalled = [
            now - worker.activity.idle_since for worker in self._live_workers() if not self._is_busy_waiting(worker)
        ]
        busy_waiting = [
            self._step_rate.seconds_since_step(now) for worker in self._live_workers() if self._is_busy_waiting(worker)
        ]
        remote = [where.still_seconds for where in self._remote_ranks.statuses.values() if where.state == "waits"]
        return min(self._step_rate.seconds_since_step(now), max([*stalled, *busy_waiting, *remote], default=0.0))

    def _is_busy_waiting(self, worker: WorkerMonitor) -> bool:
        """Whether a wait of this rank's may not look like one: for a GPU, the CPU waits by asking again and again.
        Without a timeout of the user's nobody is asked for that: an evaluation looks the same.
        """
        return worker.config.device != "cpu" and self._step_rate.steps > 0 and self._config.timeout_seconds is not None

    def _report_recovery(self) -> Iterator[AnyRecord]:
        """All is well, or well again."""
        self._next_check_at = 0.0
        if self._reported_seconds:
            self._step_rate.record_pause(self._reported_seconds)
            if self._config.others.judges:
                yield _make_notice(f"the job goes on, after {timed(self._reported_seconds)}")
            else:
                for rank in self._worker_configs:
                    yield RankStatus(rank=rank, time_ns=time.monotonic_ns(), state="moves")
        self._reported_seconds = 0.0

    def _diagnose(self, now: float) -> Iterator[AnyRecord]:
        stall_limit, stalled = self._stall_limit, self._stalled_seconds(now)
        self._next_check_at = self._choose_next_check(stalled)
        local = self._local_statuses(now, gpu_waits=False)
        # That a GPU waits cannot be told from that it computes: it is believed if another rank is sure not to come.
        if any(where.state in ("blocked", "stopped", "debugged") for where in local.values()):
            local = self._local_statuses(now, gpu_waits=True)
        yield from (msgspec.structs.replace(where, asked=self._is_requested) for where in local.values())
        self._is_requested = False
        if not self._config.others.judges:
            self._reported_seconds = stalled
            write_stacks(self._config.stacks_file, self._live_workers())
        elif self._timed_out:
            yield from self._report_missing_ranks(self._all_statuses(local))
        else:
            diagnosis = diagnose(
                self._all_statuses(local), seconds=stalled, steps=self._step_rate.steps, stall_limit=stall_limit
            )
            if diagnosis is not None:
                yield self._report_diagnosis(diagnosis, stall_limit)

    def _report_missing_ranks(self, statuses: Mapping[int, RankStatus]) -> Iterator[HangDetected]:
        diagnosis = find_missing(statuses, self._timed_out)
        if diagnosis is not None:
            self._is_finished = True
            yield self._make_verdict(diagnosis, more="; PyTorch's timeout was over")

    def _choose_next_check(self, stalled: float) -> float:
        """After how long a standstill to look again; exactly when the user's timeout is over, for one."""
        timeout = self._config.timeout_seconds
        return 2 * stalled if timeout is None or stalled >= timeout else min(2 * stalled, timeout)

    def _local_statuses(self, now: float, *, gpu_waits: bool) -> dict[int, RankStatus]:
        local = {}
        for rank, worker in self._workers.items():
            if rank in self._ended:
                doing = "goes on" if worker.is_alive else ""
                local[rank] = RankStatus(rank=rank, time_ns=time.monotonic_ns(), state="ended", doing=doing)
            else:
                local[rank] = worker.status(now, stall_limit=self._stall_limit, gpu_waits=gpu_waits)
        return local

    def _report_diagnosis(self, diagnosis: HangDiagnosis, stall_limit: float) -> AnyRecord:
        abort_after = diagnosis.abort_after(timeout=self._config.timeout_seconds, stall_limit=stall_limit)
        # Who computes and writes output is alive, whatever it does.
        computing = [each.quiet_seconds for each in diagnosis.missing if each.state == "computes"]
        delay = max((abort_after - quiet for quiet in computing), default=0.0)
        stacks = write_stacks(self._config.stacks_file, self._live_workers(), self._remote_ranks.statuses.values())
        if diagnosis.seconds >= abort_after and delay <= 0:
            self._is_finished = True
            return self._make_verdict(diagnosis)
        self._reported_seconds = diagnosis.seconds
        self._next_check_at = min(self._next_check_at, max(abort_after, diagnosis.seconds + delay))
        return _make_notice(
            format_report(diagnosis, self._step_rate, host_name=self._config.host_name, stacks_file=stacks)
        )

    def _make_verdict(self, diagnosis: HangDiagnosis, more: str = "") -> HangDetected:
        missing_rank = diagnosis.missing[0] if diagnosis.missing else diagnosis.waiting[0]
        text = format_headline(diagnosis, host_name=self._config.host_name) + more
        trace = "\n".join(truncate_stack(missing_rank.stack))
        return HangDetected(rank=missing_rank.rank, time_ns=time.monotonic_ns(), headline=text, traceback=trace)

    def _all_statuses(self, local: Mapping[int, RankStatus]) -> dict[int, RankStatus]:
        """Every rank of the job; of those of which their host tells nothing is known that they run."""
        size = self._config.worker_configs[0].world_size
        statuses = {}
        for rank in range(size):
            state: RankStatus | None = local.get(rank) or self._remote_ranks.statuses.get(rank)
            if rank in self._ended and rank not in local:
                state = RankStatus(rank=rank, time_ns=0, state="ended")
            unknown = RankStatus(rank=rank, time_ns=0, state="computes", text="a place that its host has not told")
            statuses[rank] = unknown if state is None or state.state == "moves" else state
        return statuses


def _make_notice(text: str) -> Notice:
    return Notice(rank=0, time_ns=time.monotonic_ns(), text=text)

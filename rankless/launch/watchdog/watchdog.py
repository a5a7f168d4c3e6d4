"""The watchdog: check the workers about once a second, collect stacks if the job stalls, and report the result."""

import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from rankless.config.process_configs import WorkerConfig
from rankless.launch.other_hosts_interface import Peers
from rankless.launch.watchdog import load_part
from rankless.launch.watchdog.phase_timeouts import StepRate
from rankless.launch.watchdog.process_activity import ActivityTracker
from rankless.launch.watchdog.processes_beside_workers import ProcessMonitor, ProcessStatus
from rankless.launch.watchdog.worker_idleness_and_location import WorkerMonitor, status_before_start, write_stacks
from rankless.records.events import (
    NO_RANK,
    AnyRecord,
    Exited,
    HangDetected,
    Notice,
    ProcessObserved,
    Raised,
    RankStatus,
    ScriptFinished,
    Started,
)
from rankless.records.live_run import ProcessRow
from rankless.records.number_formatting import format_seconds
from rankless.records.worker_status import open_page

if TYPE_CHECKING:
    from rankless.launch.watchdog.hang_verdict import HangDiagnosis
    from rankless.launch.watchdog.slow_ranks import SlowRanks

LONGEST_INTERVAL_SECONDS = 1.0
"""Between two checks of the workers."""
SHORTEST_INTERVAL_SECONDS = 0.1
COMPARES_AFTER_SECONDS = 10.0
"""How long after the start ranks are measured first: their first steps capture, and the agent has other work."""
RESPONSE_TIMEOUT_SECONDS = 2.5
"""For another host's response: it requests the stacks of its own workers first."""


class RemoteRanks:
    """The latest status of each rank on another host.

    Args:
        peers: The other hosts.
        ranks: The ranks there.
        processes: The processes on hosts without workers, which respond too.
    """

    def __init__(self, peers: Peers, ranks: Collection[int], *, processes: Collection[tuple[str, int]] = ()) -> None:
        self._peers = peers
        self._ranks, self._processes = frozenset(ranks), frozenset(processes)
        self._pending: frozenset[int] = frozenset()
        self._pending_processes: frozenset[tuple[str, int]] = frozenset()
        self._requested_at = 0.0
        self.statuses: dict[int, RankStatus] = {}

    def receive(self, where: RankStatus) -> None:
        """Store a status that a host sent, on request or on its own."""
        self.statuses[where.rank] = where
        self._pending -= {where.rank}

    def receive_process(self, observed: ProcessObserved) -> None:
        """Note that the host of a process has responded."""
        self._pending_processes -= {(observed.role, observed.number)}

    def request_statuses(self, now: float) -> None:
        """Request the status of every remote rank, and of processes on hosts without ranks."""
        if self._ranks or self._processes:
            self._peers.request_rank_status()
            self._pending, self._pending_processes, self._requested_at = self._ranks, self._processes, now

    def is_complete(self, now: float, *, ended: Collection[int]) -> bool:
        """Return True once all but the ranks in `ended` have responded, or the responses have timed out."""
        return (
            self._pending <= set(ended) and not self._pending_processes
        ) or now - self._requested_at > RESPONSE_TIMEOUT_SECONDS


def open_status_pages(count: int, *, timeout_seconds: float | None = None) -> list[int]:
    """Create the shared memory for `count` workers; empty if the timeout is 0 or the system is not Linux."""
    return [open_page() for _ in range(count)] if timeout_seconds != 0 and sys.platform == "linux" else []


@dataclass(frozen=True, kw_only=True)
class WatchdogConfig:
    """What the watchdog watches."""

    worker_configs: Sequence[WorkerConfig]
    """The workers of this host."""
    pages: Sequence[int]
    """Descriptors of the workers' shared memory; empty turns the watchdog off."""
    timeout_seconds: float | None
    """The user's `--hang-timeout`; None if the user gave none, 0 to never end the job."""
    peers: Peers
    """The other hosts. The host whose `peers.attributes_failures` is True reports hangs and ends the job."""
    parent_process: Callable[[], int | None] = lambda: None
    """Returns the process that starts this host's workers; None while there is none."""
    stacks_file: str
    """The file to which the watchdog appends the stacks of all threads."""
    host_name: Callable[[int], str] = lambda _rank: ""
    list_rows: Callable[[], Sequence[ProcessRow]] = list
    """Returns the processes of this host beside its workers."""
    end_workers: Callable[[Sequence[int]], bool] = lambda _ranks: False
    """Ends ranks that hold up the others, if these can continue without them, and returns whether they can."""
    process_host_name: Callable[[tuple[str, int]], str] = lambda _name: ""
    """Returns the name of the host of a process of the job."""
    lone_processes: Sequence[tuple[str, int]] = ()
    """The processes of the job on hosts without workers."""


class Watchdog:
    """Receives every record of the run, and returns new records on each tick."""

    def __init__(self, config: WatchdogConfig) -> None:
        self._config = config
        self._worker_configs = {each.rank: each for each in config.worker_configs}
        self._pages = {each.rank: page for each, page in zip(config.worker_configs, config.pages, strict=False)}
        self._workers: dict[int, WorkerMonitor] = {}
        self._parent: ActivityTracker | None = None
        self._finished: set[int] = set()
        """The ranks whose script has ended, of all hosts. The process of some may still run."""
        self._ended: set[int] = set()
        """The ranks whose process has ended, of all hosts."""
        size = config.worker_configs[0].world_size if config.worker_configs else 0
        self._remote_ranks = RemoteRanks(
            config.peers,
            set(range(size)) - set(self._worker_configs) if config.peers.attributes_failures else (),
            processes=config.lone_processes if config.peers.attributes_failures else (),
        )
        self._processes = ProcessMonitor(config.list_rows, config.process_host_name)
        self._timed_out: dict[int, RankStatus] = {}
        self._is_requested = False
        """Whether host 0, or a collective that timed out on a rank, requested the statuses."""
        self._step_rate = StepRate()
        self._next_update_at = 0.0
        self._is_collecting = False
        self._next_check_at = 0.0
        self._started: set[int] = set()
        self._slow_ranks: SlowRanks | None = None
        self._compares_at = 0.0
        """From when on ranks are compared."""
        self._reported_seconds = 0.0
        self._is_finished = False

    def receive(self, record: AnyRecord) -> None:
        """Take note of a record."""
        self._processes.receive(record, time.monotonic())
        if self._slow_ranks is not None:
            self._slow_ranks.receive(record)
        if isinstance(record, Started):
            self._started.add(record.rank)
        if isinstance(record, Started) and record.rank in self._pages:
            config, page = self._worker_configs[record.rank], self._pages[record.rank]
            self._workers[record.rank] = WorkerMonitor(config, record.pid, page, time.monotonic())
        elif isinstance(record, ScriptFinished):
            self._finished.add(record.rank)
        elif isinstance(record, Exited):
            self._finished.add(record.rank)
            self._ended.add(record.rank)
        elif isinstance(record, Raised):
            where = load_part("hang_verdict").parse_timeout(record)
            if where is not None:
                self._timed_out[record.rank] = where
                self._is_requested = True
        elif isinstance(record, ProcessObserved):
            self._remote_ranks.receive_process(record)
        elif isinstance(record, RankStatus) and record.rank not in self._worker_configs:
            self._remote_ranks.receive(record)
            if not record.requested and record.state != "moves":
                self._next_check_at = 0.0

    def tick(self, now: float) -> list[AnyRecord]:
        """Check the workers if a check is due, and return the records to send."""
        return [*self._check(now), *self._find_slow_ranks(now)]

    def _find_slow_ranks(self, now: float) -> list[AnyRecord]:
        """Return what has changed of ranks for which others wait, from some seconds after the start on."""
        if not self._pages or self._is_finished:
            return []
        self._compares_at = self._compares_at or now + COMPARES_AFTER_SECONDS
        if self._slow_ranks is None and now >= self._compares_at:
            self._slow_ranks = load_part("slow_ranks").SlowRanks(
                self._pages,
                self._config.worker_configs[0].mesh,
                is_host_0=self._config.peers.attributes_failures,
                living=self._started - self._ended,
            )
        return [] if self._slow_ranks is None else self._slow_ranks.tick(now)

    def _check(self, now: float) -> list[AnyRecord]:
        if not self._worker_configs:
            return list(self._observe_lone_processes(now))
        if not self._pages or self._is_finished:
            return []
        self._is_requested = self._config.peers.take_rank_status_request() or self._is_requested
        if self._is_collecting:
            # Ask every worker, without a short circuit: each may have further processes to query.
            completed = [worker.is_complete(now) for worker in self._list_workers()]
            if not all(completed) or not self._remote_ranks.is_complete(now, ended=self._ended):
                return []
            self._is_collecting = False
            return list(self._diagnose(now))
        if now < self._next_update_at and not self._is_requested:
            return []
        stall_limit = self._stall_limit
        self._next_update_at = now + min(LONGEST_INTERVAL_SECONDS, max(SHORTEST_INTERVAL_SECONDS, stall_limit / 8))
        self._update_parent(now)
        for worker in self._list_workers():
            worker.update(now)
        self._processes.update(now)
        self._step_rate.update([worker.page for worker in self._workers.values()])
        stalled = self._stalled_seconds(now)
        if self._is_requested or (stalled >= self._stall_limit and stalled >= self._next_check_at):
            self._start_collecting(now)
        elif stalled < self._stall_limit and not self._processes.is_restarting:
            return list(self._report_recovery())
        return []

    def _observe_lone_processes(self, now: float) -> Iterator[AnyRecord]:
        """Yield for host 0, if it asks, what the processes of this host without workers do."""
        if now >= self._next_update_at:
            self._next_update_at = now + SHORTEST_INTERVAL_SECONDS
            self._processes.update(now)
        if self._config.peers.take_rank_status_request():
            yield from self._processes.make_records(now)

    def _start_collecting(self, now: float) -> None:
        for worker in self._list_workers():
            worker.request_stacks(now)
        self._remote_ranks.request_statuses(now)
        self._is_collecting = True

    @property
    def _stall_limit(self) -> float:
        """The pause in seconds from which the job counts as stalled."""
        timeout, stall_limit = self._config.timeout_seconds, self._step_rate.stall_limit
        return stall_limit if timeout is None else min(stall_limit, timeout / 2)

    def _update_parent(self, now: float) -> None:
        """Watch the process that starts the workers while one has not started, or its end is not reported."""
        if len(self._workers) == len(self._worker_configs) and not self._finished - self._ended:
            return
        process_id = self._config.parent_process()
        if process_id is not None and (self._parent is None or self._parent.process_id != process_id):
            self._parent = ActivityTracker(process_id, now)
        if self._parent is not None:
            self._parent.update(now)

    def _list_workers(self) -> list[WorkerMonitor]:
        """Return this host's workers whose process has not ended."""
        return [worker for rank, worker in self._workers.items() if rank not in self._ended]

    def _live_workers(self) -> list[WorkerMonitor]:
        """Return this host's workers whose script has not ended."""
        return [worker for rank, worker in self._workers.items() if rank not in self._finished]

    def _stalled_seconds(self, now: float) -> float:
        """How long some rank has been idle while no rank made a step, and all other processes served and were idle."""
        stalled = [now - worker.idle_since() for worker in self._live_workers() if not self._is_busy_waiting(worker)]
        busy_waiting = [
            self._step_rate.seconds_since_step(now) for worker in self._live_workers() if self._is_busy_waiting(worker)
        ]
        if self._parent is not None and len(self._workers) < len(self._worker_configs):
            stalled.append(now - self._parent.tree_idle_since)
        finished = [worker for worker in self._list_workers() if worker.config.rank in self._finished]
        stalled += [now - worker.activity.tree_idle_since for worker in finished]
        statuses = self._remote_ranks.statuses.values()
        remote = [where.idle_seconds for where in statuses if where.state not in ("moves", "computes", "debugged")]
        return min(
            self._step_rate.seconds_since_step(now),
            self._processes.seconds_since_restart(now),
            self._processes.seconds_since_activity(now),
            max([*stalled, *busy_waiting, *remote], default=0.0),
        )

    def _is_busy_waiting(self, worker: WorkerMonitor) -> bool:
        """Return whether the rank may look busy while it waits, because its CPU polls the GPU.

        An evaluation looks the same, so this counts only with a timeout from the user.
        """
        return worker.config.device != "cpu" and self._step_rate.steps > 0 and self._config.timeout_seconds is not None

    def _report_recovery(self) -> Iterator[AnyRecord]:
        """The job makes progress: report it if the watchdog had reported a stall."""
        self._next_check_at = 0.0
        if self._reported_seconds:
            self._step_rate.record_pause(self._reported_seconds)
            if self._config.peers.attributes_failures:
                yield _make_notice(f"the job continues after a pause of {format_seconds(self._reported_seconds)}")
            else:
                for rank in self._worker_configs:
                    yield RankStatus(rank=rank, time_ns=time.monotonic_ns(), state="moves")
        self._reported_seconds = 0.0

    def _diagnose(self, now: float) -> Iterator[AnyRecord]:
        self._processes.update(now)
        stall_limit, stalled = self._stall_limit, self._stalled_seconds(now)
        self._next_check_at = self._choose_next_check(stalled)
        local = self._local_statuses(now, gpu_waits=False)
        # A waiting GPU looks like a computing one. Assume that it waits if another rank surely holds up the job.
        if any(where.state in ("blocked", "stopped", "debugged") for where in local.values()):
            local = self._local_statuses(now, gpu_waits=True)
        if not self._config.peers.attributes_failures:  # host 0 waits for the statuses of ranks, which follow
            yield from self._processes.make_records(now)
        yield from (msgspec.structs.replace(where, requested=self._is_requested) for where in local.values())
        self._is_requested = False
        if not self._config.peers.attributes_failures:
            self._reported_seconds = stalled
            write_stacks(self._config.stacks_file, self._list_workers())
        elif self._timed_out:
            yield from self._report_missing_ranks(self._all_statuses(local))
        elif not self._processes.is_restarting:
            ranks, processes = self._all_statuses(local), self._processes.list_statuses(now)
            verdict = load_part("hang_verdict")
            diagnosis = verdict.blame_processes(ranks, processes, seconds=stalled) or verdict.diagnose(
                ranks, seconds=stalled, stall_limit=stall_limit
            )
            if diagnosis is not None:
                diagnosis = replace(diagnosis, busy=tuple(each for each in processes if each.is_busy))
                yield from self._report_diagnosis(diagnosis, stalled - diagnosis.seconds, processes)

    def _report_missing_ranks(self, statuses: Mapping[int, RankStatus]) -> Iterator[HangDetected]:
        diagnosis = load_part("hang_verdict").diagnose_timeout(statuses, self._timed_out)
        if diagnosis is not None:
            self._is_finished = True
            yield self._make_verdict(diagnosis, more="; PyTorch's timeout expired")

    def _choose_next_check(self, stalled: float) -> float:
        """Return the stall in seconds at which to check again: twice `stalled`, but at most the user's timeout."""
        timeout = self._config.timeout_seconds
        return 2 * stalled if timeout is None or stalled >= timeout else min(2 * stalled, timeout)

    def _local_statuses(self, now: float, *, gpu_waits: bool) -> dict[int, RankStatus]:
        local = {}
        for rank in self._worker_configs:
            worker = self._workers.get(rank)
            if rank in self._ended:
                local[rank] = RankStatus(rank=rank, time_ns=time.monotonic_ns(), state="ended")
            elif worker is None and self._parent is not None:
                local[rank] = status_before_start(rank, self._parent, now)
            elif worker is not None and rank in self._finished:
                local[rank] = worker.status_after_script(now, self._parent)
            elif worker is not None:
                local[rank] = worker.status(now, stall_limit=self._stall_limit, gpu_waits=gpu_waits)
        return local

    def _report_diagnosis(
        self, diagnosis: "HangDiagnosis", later: float, processes: Sequence[ProcessStatus]
    ) -> Iterator[AnyRecord]:
        """Report a hang if it has lasted long enough, or choose when to check again.

        Args:
            diagnosis: The hang.
            later: How many seconds after the stall's start it began.
            processes: The state of every process beside the workers.
        """
        stall_limit, timeout = self._stall_limit, self._config.timeout_seconds
        abort_after = diagnosis.abort_after(timeout=timeout, stall_limit=stall_limit)
        least_seconds = max(stall_limit, min(diagnosis.least_seconds, float("inf") if timeout is None else timeout / 2))
        if diagnosis.seconds < least_seconds:
            self._next_check_at = min(self._next_check_at, later + least_seconds)
            return
        # A rank that computes and writes output is alive.
        computing = [each.silent_seconds for each in diagnosis.missing if each.state == "computes"]
        delay = max((abort_after - quiet for quiet in computing), default=0.0)
        stacks = write_stacks(self._config.stacks_file, self._list_workers(), self._remote_ranks.statuses.values())
        if diagnosis.seconds >= abort_after and delay <= 0:
            frozen = [each.rank for each in diagnosis.missing if each.state == "stopped"]
            if frozen and len(frozen) == len(diagnosis.missing) and self._config.end_workers(frozen):
                verdict = self._make_verdict(diagnosis)
                yield _make_notice(f"rank {verdict.rank} {verdict.headline}")
                return
            self._is_finished = True
            yield self._make_verdict(diagnosis)
            return
        self._reported_seconds = diagnosis.seconds
        self._next_check_at = min(self._next_check_at, later + max(abort_after, diagnosis.seconds + delay))
        yield _make_notice(
            load_part("report").format_report(
                diagnosis,
                self._step_rate,
                host_name=self._config.host_name,
                stacks_file=stacks,
                processes=processes,
            )
        )

    def _make_verdict(self, diagnosis: "HangDiagnosis", more: str = "") -> HangDetected:
        text, now = (
            load_part("report").format_headline(diagnosis, host_name=self._config.host_name) + more,
            time.monotonic_ns(),
        )
        if diagnosis.silent:
            first = diagnosis.silent[0]
            return HangDetected(
                rank=NO_RANK, time_ns=now, headline=text, traceback="", number=first.index, role=first.role
            )
        missing_rank = diagnosis.missing[0] if diagnosis.missing else diagnosis.waiting[0]
        trace = "\n".join(load_part("stack_classifier").truncate_stack(missing_rank.stack))
        return HangDetected(rank=missing_rank.rank, time_ns=now, headline=text, traceback=trace)

    def _all_statuses(self, local: Mapping[int, RankStatus]) -> dict[int, RankStatus]:
        """Return the status of every rank. A rank whose host sent no status counts as computing."""
        size = self._config.worker_configs[0].world_size
        statuses = {}
        for rank in range(size):
            state: RankStatus | None = local.get(rank) or self._remote_ranks.statuses.get(rank)
            if rank in self._ended and rank not in local:
                state = RankStatus(rank=rank, time_ns=0, state="ended")
            unknown = RankStatus(rank=rank, time_ns=0, state="computes", text="a line that its host did not report")
            statuses[rank] = unknown if state is None or state.state == "moves" else state
        return statuses


def _make_notice(text: str) -> Notice:
    return Notice(rank=0, time_ns=time.monotonic_ns(), text=text)

"""Monitor this host's workers: how long each has been idle, and where in the script it is.

Note [rendezvous polls]: rank 0 of PyTorch's store looks a hundred times a second whether the others have joined. By its
context switches it is not idle. So the monitor also reads the stack of a worker that uses little CPU time. If the
worker is in a rendezvous, the time since which it has used little CPU time is its idle time.
"""

import os
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankless.config.available_cpu_and_memory import describe_little_shared_memory
from rankless.config.process_configs import WorkerConfig
from rankless.launch.watchdog import load_part
from rankless.launch.watchdog.process_activity import (
    WAITS_FOR_DISK,
    ActivityTracker,
    ProcessStats,
    UnansweredConnection,
    describe_wait,
    iterate_descendants,
    read_process_stats,
)
from rankless.records.events import RankState, RankStatus
from rankless.records.private_files import private_opener
from rankless.records.worker_status import WorkerStatus, read_page

if TYPE_CHECKING:
    from rankless.launch.watchdog.stack_classifier import StackLocation
    from rankless.launch.watchdog.stacks import Frame, StackRequest

MAX_DATA_LOADER_WORKERS = 8
FIRST_LOOK_SECONDS = 10.0
"""The quiet time after which the monitor reads a stack; the next time after twice as long."""
SHORT_IDLE_SECONDS = 1.5
"""Longer than the interval between two checks."""


class WorkerMonitor:
    """Monitors one worker of this host."""

    def __init__(self, config: WorkerConfig, process_id: int, descriptor: int, now: float) -> None:
        self.config = config
        self.activity = ActivityTracker(process_id, now)
        self.connection_attempts = UnansweredConnection(process_id)
        self.stack_request: StackRequest | None = None
        self._descriptor = descriptor
        self._has_requested_data_loader_workers = False
        self._has_requested_stacks = False
        """Whether stacks were requested since the update before the last."""
        self._logs = [path for path in (config.log_file, config.error_log_file) if path is not None]
        self._written = 0
        self._written_at = now
        self._next_look_seconds = FIRST_LOOK_SECONDS
        self._is_looking = False
        self._is_in_rendezvous = False

    @property
    def page(self) -> WorkerStatus:
        """The counters in the worker's shared memory."""
        return read_page(self._descriptor)

    def update(self, now: float) -> None:
        """Read the process's counters and the size of its log files."""
        # Stacks that this process has requested are no activity of the worker.
        self.activity.update(now, with_bytes=not self._has_requested_stacks)
        self._has_requested_stacks = not self.is_complete(now)
        written = 0
        for path in self._logs:
            with suppress(OSError):
                written += os.stat(path).st_size
        if written != self._written:
            self._written, self._written_at = written, now
        if now - self.activity.quiet_since >= SHORT_IDLE_SECONDS:
            self.connection_attempts.update(now)
        self._look(now)

    def idle_since(self) -> float:
        """Return since when the worker has been idle, or quiet in a rendezvous. See Note [rendezvous polls]."""
        return self.activity.quiet_since if self._is_in_rendezvous else self.activity.idle_since

    def _look(self, now: float) -> None:
        """Read the stack of a worker that is quiet but not idle. See Note [rendezvous polls]."""
        quiet_seconds, idle_seconds = now - self.activity.quiet_since, now - self.activity.idle_since
        if self._is_looking and not self._has_requested_stacks:
            self._is_looking = False
            self._is_in_rendezvous = self._location().is_rendezvous
        elif quiet_seconds < FIRST_LOOK_SECONDS:
            self._next_look_seconds, self._is_in_rendezvous = FIRST_LOOK_SECONDS, False
        elif quiet_seconds >= self._next_look_seconds and idle_seconds < quiet_seconds / 2:
            self._next_look_seconds = 2 * quiet_seconds
            self._is_looking = True
            self.request_stacks(now)

    def request_stacks(self, now: float) -> None:
        """Request the stacks of the worker."""
        self.stack_request = load_part("stacks").StackRequest(self.activity.process_id, self._descriptor, now)
        self._has_requested_data_loader_workers = False
        self._has_requested_stacks = True

    def is_complete(self, now: float) -> bool:
        """Return True once the stacks are there, including its DataLoader workers' if it waits for them."""
        if self.stack_request is None:
            return True
        if not self.stack_request.is_complete(now):
            return False
        if not self._has_requested_data_loader_workers and self._location().waits_for_data:
            self._has_requested_data_loader_workers = True
            self.stack_request.add(list(iterate_descendants(self.activity.process_id))[:MAX_DATA_LOADER_WORKERS], now)
        return self.stack_request.is_complete(now)

    def status(self, now: float, *, stall_limit: float, gpu_waits: bool) -> RankStatus:
        """Return the worker's status from its counters and stacks.

        Args:
            now: `time.monotonic()` in seconds.
            stall_limit: The pause in seconds that is unusual for this job.
            gpu_waits: Whether a rank that waits for its GPU counts as waiting for other ranks.
        """
        activity, location, stats = self.activity, self._location(), self.activity.stats
        self._is_in_rendezvous = location.is_rendezvous
        state, doing, text, line = self._state(stats, location, now, stall_limit), "", location.text, location.line
        if state == "computes" and self.config.device != "cpu" and location.gpu_wait and gpu_waits:
            state, doing = "waits", location.gpu_wait  # the CPU polls while the GPU waits for other ranks
        elif state == "waits":
            doing = location.collective
        elif state == "stopped":
            doing = f"kill -CONT {activity.process_id} resumes it"
        elif stats is not None and stats.state == "D":
            doing = WAITS_FOR_DISK
        elif state == "blocked":
            doing = describe_wait(activity.process_id)
        elif state == "computes" and now - activity.idle_since > stall_limit / 2:
            doing = "waits for its child processes, which run"
        elif state == "computes" and now - activity.tree_idle_since > SHORT_IDLE_SECONDS:
            doing = describe_wait(activity.process_id)  # idle, but not yet for long enough to count as blocked
        if location.waits_for_data:
            found = self._describe_data_loader_workers(location)
            text, line = text + found.text, found.line
            doing = found.wait if found.wait and state == "blocked" else doing
        return RankStatus(
            rank=self.config.rank,
            time_ns=time.monotonic_ns(),
            state=state,
            idle_seconds=now
            - (activity.tree_idle_since if state == "blocked" or doing == WAITS_FOR_DISK else self.idle_since()),
            silent_seconds=now - self._written_at,
            cpu_percent=activity.cpu_percent,
            doing=doing,
            line=line,
            text=text,
            stack=location.stack,
            connecting_to=self.connection_attempts.unanswered if state == "waits" else "",
            is_rendezvous=state == "waits" and location.is_rendezvous,
            phase=location.phase,
        )

    def status_after_script(self, now: float, parent: ActivityTracker | None) -> RankStatus:
        """Return the status of a worker whose script has ended, and whose process has not, as far as is known.

        Args:
            now: `time.monotonic()` in seconds.
            parent: The process that starts the workers, and takes note of their ends.
        """
        doing, text = "", self._location().text
        stats = read_process_stats(self.activity.process_id)
        if stats is None or stats.state in "ZX":
            doing = f"stays a zombie: the process that starts the workers {_describe_parent(parent)}"
        elif stats.state == "T":
            doing = f"is stopped by a signal (kill -CONT {self.activity.process_id} resumes it)"
        else:
            doing = "still runs" + (f" at {text}" if text and text != "the end of its script" else "")
        return RankStatus(
            rank=self.config.rank,
            time_ns=time.monotonic_ns(),
            state="ended",
            idle_seconds=now - self.activity.tree_idle_since,
            doing=doing,
            stack=self._location().stack,
            phase="teardown",
        )

    def _state(
        self, stats: ProcessStats | None, location: "StackLocation", now: float, stall_limit: float
    ) -> RankState:
        if stats is None or stats.state in "ZX":
            return "ended"
        if stats.tracer_pid or stats.state == "t" or location.is_debugged:
            return "debugged"
        if stats.state == "T":
            return "stopped"
        if location.collective:
            return "waits"
        is_idle = now - self.activity.tree_idle_since >= stall_limit / 2
        return "blocked" if is_idle and stats.state != "D" else "computes"

    def _location(self) -> "StackLocation":
        stacks = {} if self.stack_request is None else self.stack_request.stacks
        text, classifier = stacks.get(self.activity.process_id), load_part("stack_classifier")
        location: StackLocation = (
            classifier.StackLocation() if text is None else classifier.classify_stack(self._parse_main_stack(text))
        )
        return location

    def _parse_main_stack(self, text: str) -> "list[Frame]":
        frames: list[Frame] = load_part("stacks").parse_main_stack(text, self.page.main_thread)
        return frames

    def _describe_data_loader_workers(self, location: "StackLocation") -> "DataLoaderWait":
        """Say for which DataLoader worker a rank waits: one in the script's own code, or one that is stopped."""
        stacks = {} if self.stack_request is None else self.stack_request.stacks
        for process_id, text in stacks.items():
            inside = load_part("stack_classifier").locate_data_loader_worker(self._parse_main_stack(text))
            if process_id != self.activity.process_id and inside is not None:
                text = f"; its DataLoader worker, process {process_id}, is in {inside.text}"
                return DataLoaderWait(text=text, line=inside.line, wait=describe_wait(process_id))
        for process_id in iterate_descendants(self.activity.process_id):
            stats = read_process_stats(process_id)
            if stats is not None and stats.state == "T":
                how = f"is stopped by a signal (kill -CONT {process_id} resumes it)"
                return DataLoaderWait(
                    text=f"; its DataLoader worker, process {process_id}, {how}", line=location.line, wait="is idle"
                )
        hint = describe_little_shared_memory(f"/proc/{self.activity.process_id}/root")
        return DataLoaderWait(text=f"; {hint}" if hint else "", line=location.line)


@dataclass(frozen=True, kw_only=True)
class DataLoaderWait:
    """What a rank waits for whose DataLoader has not delivered a batch."""

    text: str
    """To follow where the rank is; "" if nothing is known."""
    line: str
    wait: str = ""
    """How the DataLoader worker is idle."""


def status_before_start(rank: int, parent: ActivityTracker, now: float) -> RankStatus:
    """Return the status of a rank that has not started: what the process does that starts it."""
    stats = parent.stats
    text = f"its process has not started: process {parent.process_id}, which starts the workers,"
    state: RankState = "computes"
    doing = describe_wait(parent.process_id)
    if stats is None or stats.state in "ZX":
        state = "moves"  # the agent ends the run
    elif stats.state == "T":
        state, doing = "stopped", f"kill -CONT {parent.process_id} resumes it"
    elif now - parent.tree_idle_since > SHORT_IDLE_SECONDS and stats.state != "D":
        state = "blocked"
    return RankStatus(
        rank=rank,
        time_ns=time.monotonic_ns(),
        state=state,
        idle_seconds=now - parent.tree_idle_since,
        silent_seconds=now - parent.tree_idle_since,
        cpu_percent=parent.cpu_percent,
        doing=doing,
        text=text,
        phase="start",
    )


def _describe_parent(parent: ActivityTracker | None) -> str:
    if parent is not None and parent.stats is not None and parent.stats.state == "T":
        return f"is stopped by a signal (kill -CONT {parent.process_id} resumes it)"
    return "does not reap it"


def write_stacks(path: str, workers: Sequence[WorkerMonitor], remote_statuses: Collection[RankStatus] = ()) -> str:
    """Append all collected stacks to a file and return its relative path, or "" if the file cannot be written."""
    try:
        with open(path, "a", encoding="utf-8", opener=private_opener) as file:
            file.write(time.strftime("== %Y-%m-%d %H:%M:%S\n"))
            for worker in workers:
                stacks = {} if worker.stack_request is None else worker.stack_request.stacks
                for process_id, text in stacks.items():
                    file.write(f"-- rank {worker.config.rank}, process {process_id}\n{text}\n")
            for where in remote_statuses:
                frames = "".join(f"  {frame}\n" for frame in where.stack)
                file.write(f"-- rank {where.rank}, on another host: {where.text}\n{frames}\n")
    except OSError:
        return ""
    return os.path.relpath(path)

"""The workers of an elastic job on this machine, watched: who stands still, and where; and the end of who always does.

What the hang watch of other jobs sees, it sees too, by the same means (`launch.watchdog`). It judges nobody: the driver
knows who is in a round with whom.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator

from rankless.config.worker_config import WorkerConfig
from rankless.launch.watchdog.report import describe_status
from rankless.launch.watchdog.stack_classifier import truncate_stack
from rankless.launch.watchdog.watchdog import open_status_pages
from rankless.launch.watchdog.worker_monitor import WorkerMonitor
from rankless.records.events import AnyRecord, Exited, HangDetected, RankStatus, Started

LOOK_SECONDS = 1.0
STILL_SECONDS = 10.0
"""Shorter pauses are never spoken of."""


class WorkerWatchdog:
    """Workers by their numbers. Told of every record, and given a turn whenever the crew is."""

    def __init__(self, *, timeout_seconds: float | None) -> None:
        self._timeout_seconds = timeout_seconds
        self._configs: dict[int, tuple[WorkerConfig, int]] = {}
        self._workers: dict[int, WorkerMonitor] = {}
        self._asked: set[int] = set()
        self._told: dict[int, float] = {}
        """After a standstill of how many seconds it was told last where a worker is."""
        self._to_end: dict[int, str] = {}
        self._due = 0.0

    def expect(self, config: WorkerConfig) -> int | None:
        """The descriptor of what a worker that is about to be started writes on; None where nothing is watched."""
        pages = open_status_pages(1, timeout_seconds=self._timeout_seconds)
        for page in pages:
            self._configs[config.rank] = config, page
        return pages[0] if pages else None

    def take(self, record: AnyRecord) -> None:
        """Note what a record tells of a worker."""
        if isinstance(record, Started) and record.rank in self._configs:
            config, page = self._configs[record.rank]
            self._workers[record.rank] = WorkerMonitor(config, record.pid, page, time.monotonic())
        elif isinstance(record, Exited):
            self._forget(record.rank)

    def end(self, number: int, why: str) -> None:
        """End a worker, and say why, as soon as it stands still; one that computes is left alone."""
        self._to_end[number] = why
        self._told.pop(number, None)  # it is looked at anew, at once

    def turn(self, now: float) -> Iterator[RankStatus | HangDetected]:
        """Where those are that stand still, again after twice the time, and that they move again."""
        for number in list(self._asked):
            if self._workers[number].is_complete(now):
                self._asked.discard(number)
                yield from self._conclude(number, now)
        if now < self._due:
            return
        self._due = now + LOOK_SECONDS
        for number, worker in self._workers.items():
            worker.update(now)
            still = now - worker.activity.idle_since
            told = self._told.get(number, 0.0)
            if still < told:
                del self._told[number]
                yield RankStatus(rank=number, time_ns=time.monotonic_ns(), state="moves")
            if still >= max(STILL_SECONDS, 2 * told) and number not in self._asked:
                worker.request_stacks(now)
                self._asked.add(number)

    def close(self) -> None:
        """Let go of all."""
        for number in list(self._configs):
            self._forget(number)

    def _conclude(self, number: int, now: float) -> Iterator[RankStatus | HangDetected]:
        worker = self._workers[number]
        where = worker.status(now, stall_limit=STILL_SECONDS, gpu_waits=False)
        self._told[number] = where.still_seconds
        yield where
        if number in self._to_end and where.state in ("blocked", "stopped", "waits"):
            headline = f"{self._to_end.pop(number)}: {describe_status(where)}; it was ended"
            trace = "\n".join(truncate_stack(where.stack))
            yield HangDetected(rank=number, time_ns=time.monotonic_ns(), headline=headline, traceback=trace)
            # A DataLoader's worker that hangs would not notice that this one is gone.
            for process_id in (worker.activity.process_id, *worker.activity.children):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGKILL)

    def _forget(self, number: int) -> None:
        for known in (self._workers, self._told, self._to_end):
            known.pop(number, None)
        self._asked.discard(number)
        _, page = self._configs.pop(number, (None, None))
        if page is not None:
            os.close(page)

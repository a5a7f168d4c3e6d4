"""Watches the workers of an elastic job on this host: reports which make no progress, and kills some on request.

It observes workers with the means of `launch.watchdog`. It does not decide which worker is at fault: only the driver
knows which workers are in a round together.
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

CHECK_INTERVAL_SECONDS = 1.0
MIN_IDLE_SECONDS = 10.0
"""A shorter pause is never reported."""


class WorkerWatchdog:
    """Watches workers by their numbers. It needs every record, and a `tick` with every poll of the workers."""

    def __init__(self, *, timeout_seconds: float | None) -> None:
        self._timeout_seconds = timeout_seconds
        self._configs: dict[int, tuple[WorkerConfig, int]] = {}
        self._workers: dict[int, WorkerMonitor] = {}
        self._requested: set[int] = set()
        self._reported_seconds: dict[int, float] = {}
        """For how long a worker had been idle when its status was reported last."""
        self._kill_reasons: dict[int, str] = {}
        self._next_check_at = 0.0

    def open_page(self, config: WorkerConfig) -> int | None:
        """Return the descriptor of the status page of a worker that is about to start, or None without a watchdog."""
        pages = open_status_pages(1, timeout_seconds=self._timeout_seconds)
        for page in pages:
            self._configs[config.rank] = config, page
        return pages[0] if pages else None

    def receive(self, record: AnyRecord) -> None:
        """Process a worker's record."""
        if isinstance(record, Started) and record.rank in self._configs:
            config, page = self._configs[record.rank]
            self._workers[record.rank] = WorkerMonitor(config, record.pid, page, time.monotonic())
        elif isinstance(record, Exited):
            self._forget(record.rank)

    def kill_if_stalled(self, number: int, reason: str) -> None:
        """Kill a worker as soon as it makes no progress. A worker that computes is left alone."""
        self._kill_reasons[number] = reason
        self._reported_seconds.pop(number, None)  # request its status at once

    def tick(self, now: float) -> Iterator[RankStatus | HangDetected]:
        """Yield the status of idle workers, again each time the idle time has doubled, and of those that recover."""
        for number in list(self._requested):
            if self._workers[number].is_complete(now):
                self._requested.discard(number)
                yield from self._report(number, now)
        if now < self._next_check_at:
            return
        self._next_check_at = now + CHECK_INTERVAL_SECONDS
        for number, worker in self._workers.items():
            worker.update(now)
            idle_seconds = now - worker.activity.idle_since
            reported = self._reported_seconds.get(number, 0.0)
            if idle_seconds < reported:
                del self._reported_seconds[number]
                yield RankStatus(rank=number, time_ns=time.monotonic_ns(), state="moves")
            if idle_seconds >= max(MIN_IDLE_SECONDS, 2 * reported) and number not in self._requested:
                worker.request_stacks(now)
                self._requested.add(number)

    def close(self) -> None:
        """Close all status pages."""
        for number in list(self._configs):
            self._forget(number)

    def _report(self, number: int, now: float) -> Iterator[RankStatus | HangDetected]:
        worker = self._workers[number]
        status = worker.status(now, stall_limit=MIN_IDLE_SECONDS, gpu_waits=False)
        self._reported_seconds[number] = status.idle_seconds
        yield status
        if number in self._kill_reasons and status.state in ("blocked", "stopped", "waits"):
            headline = f"{self._kill_reasons.pop(number)}: {describe_status(status)}; it was killed"
            trace = "\n".join(truncate_stack(status.stack))
            yield HangDetected(rank=number, time_ns=time.monotonic_ns(), headline=headline, traceback=trace)
            # A DataLoader worker that hangs would not notice the death of its parent.
            for process_id in (worker.activity.process_id, *worker.activity.children):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGKILL)

    def _forget(self, number: int) -> None:
        for by_number in (self._workers, self._reported_seconds, self._kill_reasons):
            by_number.pop(number, None)
        self._requested.discard(number)
        _, page = self._configs.pop(number, (None, None))
        if page is not None:
            os.close(page)

"""The workers of an elastic job on this host: a fork server starts them one by one, and messages pass both ways.

`WorkerWatchdog` reports which make no progress, and kills some on request. It observes workers with the means of
`launch.watchdog`. It does not decide which worker is at fault: only the driver knows which workers are in a round
together.
"""

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Iterator

import msgspec

from rankless.config.process_configs import WorkerConfig, WorkerLaunch
from rankless.config.run_config import RunConfig
from rankless.launch.supervisor.fork_server_client import ForkServerClient
from rankless.launch.watchdog.report import describe_status
from rankless.launch.watchdog.stack_classifier import truncate_stack
from rankless.launch.watchdog.watchdog import open_status_pages
from rankless.launch.watchdog.worker_idleness_and_location import WorkerMonitor
from rankless.records.elastic_driver_protocol import (
    DriverMessage,
    WorkerMessage,
    open_message_channel,
    receive_worker_message,
    send_message,
)
from rankless.records.events import AnyRecord, Exited, HangDetected, RankStatus, Started, receive_records
from rankless.runtime.fork_and_spawn_server_messages import KILL, encode_signal, send_worker_launch


class LocalWorkers:
    """Workers by their numbers. `poll` returns their messages and records."""

    def __init__(self, config: RunConfig, *, log_path: str, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._launches, launches_end = open_message_channel()
        with launches_end:
            self._fork_server = ForkServerClient(config, [], log_path=log_path, launches=launches_end)
        self._channels: dict[int, socket.socket] = {}
        self._watchdog = WorkerWatchdog(timeout_seconds=config.hang_timeout_seconds)
        selector.register(self._fork_server.records, selectors.EVENT_READ)

    def start(self, launch: WorkerLaunch) -> None:
        """Start a worker. Its number is the rank in its config."""
        own_end, worker_end = open_message_channel()
        own_end.setblocking(False)
        self._channels[launch.config.rank] = own_end
        self._selector.register(own_end, selectors.EVENT_READ)
        with worker_end:
            try:
                send_worker_launch(self._launches, launch, worker_end, page=self._watchdog.open_page(launch.config))
            except OSError:
                return  # the fork server is gone: `has_ended` returns True

    def send(self, number: int, message: DriverMessage) -> None:
        """Send a message to a worker. Does nothing if the worker is gone."""
        try:
            send_message(self._channels[number], message)
        except (OSError, KeyError):
            return

    def poll(self) -> Iterator[tuple[int, WorkerMessage] | AnyRecord]:
        """Yield new messages and records. A worker's messages precede the record of its end."""
        records, _ = receive_records(self._fork_server.records)
        for number in list(self._channels):
            yield from ((number, message) for message in self._receive_messages(number))
        for record in records:
            self._watchdog.receive(record)
            if isinstance(record, Exited):
                self._close_channel(record.rank)
            yield record
        yield from self._watchdog.tick(time.monotonic())

    def kill_if_stalled(self, number: int, reason: str) -> None:
        """Kill one worker as soon as it makes no progress."""
        self._watchdog.kill_if_stalled(number, reason)

    def signal(self, number: int) -> None:
        """Send a signal to all workers, and start no others."""
        self._launches.close()
        self._fork_server.send(encode_signal(number))

    def kill(self) -> None:
        """Kill all workers."""
        self._launches.close()
        self._fork_server.wake()
        self._fork_server.send(KILL)

    def has_ended(self) -> bool:
        """Whether the fork server has ended, and with it all workers."""
        return self._fork_server.poll() is not None

    def close(self) -> None:
        """End all processes and close all channels."""
        self._launches.close()
        self._selector.unregister(self._fork_server.records)
        self._fork_server.close(timeout_seconds=1.0)
        self._watchdog.close()
        for number in list(self._channels):
            self._close_channel(number)

    def _receive_messages(self, number: int) -> Iterator[WorkerMessage]:
        while True:
            try:
                message = receive_worker_message(self._channels[number])
            except BlockingIOError:
                return
            except msgspec.MsgspecError:
                continue  # a user's process may write other data to the descriptor
            if message is None:
                self._close_channel(number)  # the fork server reports how the worker ended
                return
            yield message

    def _close_channel(self, number: int) -> None:
        channel = self._channels.pop(number, None)
        if channel is not None:
            self._selector.unregister(channel)
            channel.close()


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

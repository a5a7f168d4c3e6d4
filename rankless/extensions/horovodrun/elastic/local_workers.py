"""The workers of an elastic job on this host: a fork server starts them one by one, and messages pass both ways."""

import selectors
import socket
import time
from collections.abc import Iterator

import msgspec

from rankless.config.run_config import RunConfig
from rankless.config.worker_config import WorkerLaunch
from rankless.extensions.horovodrun.elastic.stalled_workers import WorkerWatchdog
from rankless.launch.supervisor.fork_server_client import ForkServerClient
from rankless.records.elastic_messages import (
    DriverMessage,
    WorkerMessage,
    open_message_channel,
    receive_worker_message,
    send_message,
)
from rankless.records.events import AnyRecord, Exited, receive_records
from rankless.runtime.fork_server_protocol import KILL, encode_signal, send_worker_launch


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

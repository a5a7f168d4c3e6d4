"""The workers of an elastic job on this machine: started one by one by a warm parent, and spoken with."""

import selectors
import socket
import time
from collections.abc import Iterator

import msgspec

from rankless.config.run_config import RunConfig
from rankless.config.worker_config import WorkerLaunch
from rankless.launch.elastic.worker_watchdog import WorkerWatchdog
from rankless.launch.supervisor.fork_server_client import ForkServerClient, InheritedSockets
from rankless.records.channel import receive_records
from rankless.records.elastic_messages import (
    DriverMessage,
    WorkerMessage,
    open_message_channel,
    receive_worker_message,
    send_message,
)
from rankless.records.events import AnyRecord, Exited
from rankless.runtime.spawn_protocol import KILL, encode_signal, send_worker_launch


class LocalWorkers:
    """Workers by their numbers. What they say and what happens to them is read by `turn`."""

    def __init__(self, config: RunConfig, *, log_path: str, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._orders, orders_end = open_message_channel()
        with orders_end:
            self._parent = ForkServerClient(
                config, [], log_path=log_path, sockets=InheritedSockets(launches=orders_end)
            )
        self._ends: dict[int, socket.socket] = {}
        self._watched = WorkerWatchdog(timeout_seconds=config.hang_timeout_seconds)
        selector.register(self._parent.records, selectors.EVENT_READ)

    def start(self, launch: WorkerLaunch) -> None:
        """Start a worker; its number is the rank in its plan."""
        own, its = open_message_channel()
        own.setblocking(False)
        self._ends[launch.config.rank] = own
        self._selector.register(own, selectors.EVENT_READ)
        with its:
            try:
                send_worker_launch(self._orders, launch, its, page=self._watched.expect(launch.config))
            except OSError:
                return  # the parent is gone: `has_ended` says so

    def tell(self, number: int, word: DriverMessage) -> None:
        """Say something to a worker; who is gone does not hear it, and is found to have ended."""
        try:
            send_message(self._ends[number], word)
        except (OSError, KeyError):
            return

    def turn(self) -> Iterator[tuple[int, WorkerMessage] | AnyRecord]:
        """What is new, in an order in which what a worker has said comes before its end."""
        records, _ = receive_records(self._parent.records)
        for number in list(self._ends):
            yield from ((number, word) for word in self._words_of(number))
        for record in records:
            self._watched.take(record)
            if isinstance(record, Exited):
                self._close_end(record.rank)
            yield record
        yield from self._watched.turn(time.monotonic())

    def end(self, number: int, why: str) -> None:
        """End one worker as soon as it stands still, unless it goes on."""
        self._watched.end(number, why)

    def signal(self, number: int) -> None:
        """Send a signal to all workers, and start no others."""
        self._orders.close()
        self._parent.send(encode_signal(number))

    def kill(self) -> None:
        """End all workers at once."""
        self._orders.close()
        self._parent.wake()
        self._parent.send(KILL)

    def has_ended(self) -> bool:
        """Whether the workers' parent has, and so all workers."""
        return self._parent.poll() is not None

    def close(self) -> None:
        """See to it that nothing is left."""
        self._orders.close()
        self._selector.unregister(self._parent.records)
        self._parent.close(timeout_seconds=1.0)
        self._watched.close()
        for number in list(self._ends):
            self._close_end(number)

    def _words_of(self, number: int) -> Iterator[WorkerMessage]:
        while True:
            try:
                word = receive_worker_message(self._ends[number])
            except BlockingIOError:
                return
            except msgspec.MsgspecError:
                continue  # a user's process may write rubbish to the descriptor
            if word is None:
                self._close_end(number)  # the parent will tell how it has ended
                return
            yield word

    def _close_end(self, number: int) -> None:
        end = self._ends.pop(number, None)
        if end is not None:
            self._selector.unregister(end)
            end.close()

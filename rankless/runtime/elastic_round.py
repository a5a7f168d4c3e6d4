"""A worker's side of an elastic job: it asks the driver for the next round, joins it, and receives changes of hosts.

See Note [rounds] in `records.elastic_driver_protocol`.

The driver serves the store of all rounds: see Note [rounds of a store] in `launch.authenticated_tcp_store`.
"""

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec

from rankless.config import environment
from rankless.config.process_configs import WorkerConfig, WorkerLaunch
from rankless.records.elastic_driver_protocol import (
    HostsChanged,
    ReplacementEnded,
    ReplacementWanted,
    RoundEnded,
    RoundStarted,
    StateSynced,
    WorkerDismissed,
    WorkerMessage,
    WorkerReady,
    receive_driver_message,
    send_message,
)
from rankless.runtime.fast_exit import AGENT_LISTENER
from rankless.runtime.fork_replacement import fork_replacement
from rankless.runtime.rendezvous.connect_to_run_store import open_run_store
from rankless.runtime.rendezvous.find_rendezvous import RendezvousInfo
from rankless.terminal import process_title

MAX_FAILED_ROUNDS = 20
GIVE_UP_SECONDS = 2.0
"""How long after the end of a round its members may still communicate, before this process aborts its operations."""

_Joined = TypeVar("_Joined")


class HostsChangedListener(Protocol):
    """Receives the news that workers are to leave or have been added."""

    def on_hosts_changed(self, round: int, *, removed: bool, added: bool) -> None:
        """Handle a change in this round. Called from another thread."""


class Round:
    """One round of an elastic job, in one of its members."""

    def __init__(self, message: RoundStarted) -> None:
        self.number = message.round
        self.assignment = message.assignment
        self.address = message.address
        self.must_sync = message.must_sync
        self._store = message.store
        self.store: Any = None
        self._ended = threading.Event()
        self.give_up: Callable[[str], None] | None = None
        """Called if this process is still in the round a while after its end: its peers may have ended silently."""

    @property
    def has_ended(self) -> bool:
        """Whether a member has left the round."""
        return self._ended.is_set()

    @property
    def rendezvous_info(self) -> RendezvousInfo:
        """Rank, size and store of this process in the round."""
        return RendezvousInfo(
            rank=self.assignment.rank,
            size=self.assignment.size,
            store=self.store,
            address=self.address,
            assignment=self.assignment,
        )

    def connect(self, config: WorkerConfig) -> None:
        """Connect to the store. Raises RuntimeError if nobody serves it, or the round has ended."""
        address, port = self._store or (config.store_address, config.store_port or 0)
        self.store = open_run_store(address, port, config.store_token, round=self.number)

    def close(self) -> None:
        """End the round."""
        self._ended.set()


class ElasticMember:
    """The connection of this process to the driver of its elastic job."""

    def __init__(self, end: socket.socket, config: WorkerConfig) -> None:
        self._end, self._config = end, config
        self._rounds: queue.SimpleQueue[RoundStarted | ReplacementWanted | WorkerDismissed | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._listeners: list[HostsChangedListener] = []
        self._change: HostsChanged | None = None
        self._last_ended = -1
        self.on_ended: Callable[[], None] = lambda: None
        """Called when a round ends, from another thread."""
        self.round: Round | None = None
        self.keeps_state = False
        """Whether this process leaves its round with the state that all members have, so that nobody need send it."""
        self.progress = 0
        """How many operations of the script have counted."""
        self.explain_obstacle: Callable[[], str] = str
        """Returns why this process cannot be copied in the place of a lost one; "" if it can."""
        self._start_listening()

    def _start_listening(self) -> None:
        threading.Thread(target=self._listen, name=AGENT_LISTENER, daemon=True).start()

    def take_process(self, config: WorkerConfig) -> None:
        """Be the connection of the process that takes the place of a worker, under the same descriptor."""
        while not self._rounds.empty():
            message = self._rounds.get()
            for descriptor in message.descriptors if isinstance(message, ReplacementWanted) else ():
                os.close(descriptor)  # another copy of the same worker gets them
        self._config, self._lock, self._rounds = config, threading.Lock(), queue.SimpleQueue()
        self._start_listening()

    def join_next_round(self, join: Callable[[Round], _Joined]) -> _Joined:
        """Return what `join` returns for the next round of which this process is a member.

        If `join` raises RuntimeError or OSError, other members may be gone. Then wait for the round after that.

        Raises:
            SystemExit: If the job no longer needs this process.
            RuntimeError: What `join` raises, as OSError too, if it fails MAX_FAILED_ROUNDS times and once more.
        """
        failed = 0
        while True:
            next_round = self.next_round()
            try:
                return join(next_round)
            except (RuntimeError, OSError):
                failed += 1
                if failed > MAX_FAILED_ROUNDS:
                    raise

    def next_round(self) -> Round:
        """Wait for the next round of which this process is a member. Raises SystemExit if there will be none."""
        while True:
            self._leave()
            while isinstance(message := self._rounds.get(), ReplacementWanted):
                self._make_replacement(message)
            if not isinstance(message, RoundStarted):
                raise SystemExit(0 if message is not None else 1)
            if message.interface is not None:
                environment.apply({"GLOO_SOCKET_IFNAME": message.interface})
            found = Round(message)
            with self._lock:
                self.round = found
                has_ended = self._last_ended >= found.number
            if has_ended:
                continue
            with contextlib.suppress(RuntimeError, OSError):
                found.connect(self._config)
                process_title.show_round(message.assignment.rank, message.assignment.size)
                return found

    def on_round_ended(self, give_up: Callable[[str], None]) -> None:
        """Register what to call if this process is still in the round a while after the round's end."""
        with self._lock:
            current = self.round
            if current is None:
                return
            current.give_up = give_up
        if current.has_ended:
            self._give_up_soon(current)

    @property
    def has_ended(self) -> bool:
        """Whether the round of this process has ended; that before the first one is number 0."""
        with self._lock:
            return self._last_ended >= (0 if self.round is None else self.round.number)

    def report_joined(self) -> None:
        """Report to the agent that this process has joined the others; that before the first round is number 0."""
        self._send(StateSynced(round=0 if self.round is None else self.round.number))

    def report_synced(self) -> None:
        """Report to the driver that this process has the state that all members of the round have."""
        if self.round is not None:
            self._send(StateSynced(round=self.round.number))

    def add_listener(self, listener: HostsChangedListener) -> None:
        """Call the listener on changes from now on, and on the one that this round already has."""
        with self._lock:
            if listener not in self._listeners:
                self._listeners.append(listener)
            change, current = self._change, self.round
        if change is not None and current is not None and change.round == current.number:
            listener.on_hosts_changed(change.round, removed=change.removed, added=change.added)

    def remove_listener(self, listener: HostsChangedListener) -> None:
        """Call the listener no more."""
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)

    def _make_replacement(self, wanted: ReplacementWanted) -> None:
        """Fork a process for a lost worker. The new one asks for a round as this one has done."""

        def report(process_id: int) -> None:
            self._send(ReplacementEnded(lost=wanted.lost, process_id=process_id))

        reason, is_new = self.explain_obstacle(), False
        try:
            if not reason:
                launch = msgspec.json.decode(wanted.launch, type=WorkerLaunch)
                is_new = fork_replacement(launch, wanted.descriptors, report)
        except OSError as error:
            reason = f"no process could be forked ({error.strerror or error})"
        if is_new:
            self.keeps_state = True
            self._leave()
            return
        for descriptor in wanted.descriptors:
            os.close(descriptor)
        if reason:
            self._send(ReplacementEnded(lost=wanted.lost, reason=reason))

    def _leave(self) -> None:
        with self._lock:
            left, self.round = self.round, None
        if left is not None:
            left.close()
        message = WorkerReady(
            last_round=0 if left is None else left.number, has_state=self.keeps_state, progress=self.progress
        )
        self.keeps_state = False
        self._send(message)

    def _send(self, message: WorkerMessage) -> None:
        with contextlib.suppress(OSError):  # the driver is gone, and this process will be killed soon
            send_message(self._end, message)

    def _give_up_soon(self, ended: Round) -> None:
        timer = threading.Timer(GIVE_UP_SECONDS, self._give_up, (ended,))
        timer.daemon, timer.name = True, AGENT_LISTENER
        timer.start()

    def _give_up(self, ended: Round) -> None:
        with self._lock:
            give_up = ended.give_up if self.round is ended else None
        if give_up is not None:
            give_up("A worker of this round is gone.")

    def _listen(self) -> None:
        while (message := receive_driver_message(self._end)) is not None:
            if isinstance(message, RoundStarted | ReplacementWanted | WorkerDismissed):
                self._rounds.put(message)
            elif isinstance(message, RoundEnded):
                with self._lock:
                    self._last_ended = message.round
                    ended = self.round if self.round is not None and self.round.number == message.round else None
                self.on_ended()
                if ended is not None:
                    ended.close()
                    self._give_up_soon(ended)
            else:
                with self._lock:
                    self._change = message
                    listeners = list(self._listeners)
                for listener in listeners:
                    listener.on_hosts_changed(message.round, removed=message.removed, added=message.added)
        self._rounds.put(None)


def current_member() -> ElasticMember | None:
    """Return this process as a member of its elastic job, or None if its job is not elastic."""
    global _member  # one of the pieces of state that the design allows a module
    if _member is not None and _member[0] == os.getpid():
        return _member[1]
    config = environment.read_worker_config()
    if config is None or config.rounds_descriptor is None:
        return None
    _member = os.getpid(), ElasticMember(socket.socket(fileno=config.rounds_descriptor), config)
    return _member[1]


_member: tuple[int, ElasticMember] | None = None

"""A worker's part in an elastic job: it asks for the next round, meets the others there, and hears of changes.

See Note [rounds] in `records.elastic_messages`.

Note [the store of a round]: rank 0 serves it on a port of its own, through an object that nobody uses but to close it.
When the driver says that the round is over, it is closed, and whoever waits for something in it fails at once: also for
a worker that was killed before it could write there what the others wait for.
"""

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from rankless.config import environment
from rankless.records.elastic_messages import (
    HostsChanged,
    RoundEnded,
    RoundStarted,
    StateSynced,
    StoreReady,
    WorkerDismissed,
    WorkerMessage,
    WorkerReady,
    receive_driver_message,
    send_message,
)
from rankless.runtime.rendezvous.job_store import RendezvousInfo

STORE_TIMEOUT = timedelta(seconds=300)
MOST_FAILED_MEETINGS = 20
GIVING_UP_SECONDS = 2.0
"""Once a round is over: for how long this process may still have to do with who is left, before it is told so."""

_Met = TypeVar("_Met")


class Listener(Protocol):
    """Who wants to know that workers are to go, or have come."""

    def on_hosts_changed(self, round: int, *, removed: bool, added: bool) -> None:
        """It is so, in this round. Called from another thread."""


class Round:
    """One round, as one of its members sees it."""

    def __init__(self, begin: RoundStarted) -> None:
        self.number = begin.round
        self.assignment = begin.assignment
        self.address = begin.address
        self.must_sync = begin.must_sync
        self.store: Any = None
        self._server: Any = None
        self._over = threading.Event()
        self.give_up: Callable[[str], None] | None = None
        """Called if this process is in the round still a while after it is over: its peers may have gone silently."""

    @property
    def is_over(self) -> bool:
        """Whether a member has left it already."""
        return self._over.is_set()

    @property
    def place(self) -> RendezvousInfo:
        """This process's place in it."""
        return RendezvousInfo(
            rank=self.assignment.rank,
            size=self.assignment.size,
            store=self.store,
            address=self.address,
            assignment=self.assignment,
        )

    def serve(self, address: str) -> int:
        """Serve the store; returns the port."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family, backlog=1024) as listening:
            port = int(listening.getsockname()[1])
            self._server = _store(address, port, listening=listening)
        return port

    def connect(self, address: str, port: int) -> None:
        """Connect to the store. Raises RuntimeError if it is gone."""
        self.store = _store(address, port, listening=None)

    def close(self) -> None:
        """It is over: who waits for somebody in it waits in vain."""
        self._over.set()
        self._server = None


class Membership:
    """What ties this process to the driver of its job."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._begins: queue.SimpleQueue[RoundStarted | WorkerDismissed | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []
        self._change: HostsChanged | None = None
        self._last_over = 0
        self.round: Round | None = None
        self.keeps_state = False
        """Whether this process leaves its round with the state that all members have, so that none need be sent."""
        threading.Thread(target=self._listen, name="rankless elastic rounds", daemon=True).start()

    def meet(self, join: Callable[[Round], _Met]) -> _Met:
        """What `join` returns for the next round of which this process is a member.

        `join` may fail, with RuntimeError or OSError, because others are gone by then: then the round after it is
        awaited. Raises SystemExit if there is no place for this process any more, and what `join` raises if it fails
        again and again.
        """
        failed = 0
        while True:
            met = self.next_round()
            try:
                return join(met)
            except (RuntimeError, OSError):
                failed += 1
                if failed > MOST_FAILED_MEETINGS:
                    raise

    def next_round(self) -> Round:
        """The next round of which this process is a member, with its store. Raises SystemExit if there will be none."""
        while True:
            self._leave()
            begin = self._begins.get()
            if not isinstance(begin, RoundStarted):
                raise SystemExit(0 if begin is not None else 1)
            if begin.interface is not None:
                environment.apply({"GLOO_SOCKET_IFNAME": begin.interface})
            found = Round(begin)
            with self._lock:
                self.round = found
                is_over = self._last_over >= found.number
            if is_over:
                continue
            with contextlib.suppress(RuntimeError, OSError):
                port = begin.port
                if port is None:
                    port = found.serve(begin.address)
                    self._tell(StoreReady(round=found.number, port=port))
                found.connect(begin.address, port)
                return found

    def when_over(self, give_up: Callable[[str], None]) -> None:
        """Have this called if the round is over, and this process is in it still a while after that."""
        with self._lock:
            current = self.round
            if current is None:
                return
            current.give_up = give_up
        if current.is_over:
            self._give_up_soon(current)

    def synced(self) -> None:
        """This process has the state that all members of the round have."""
        if self.round is not None:
            self._tell(StateSynced(round=self.round.number))

    def add(self, listener: Listener) -> None:
        """Tell it of changes from now on, and of what this round's members have been told already."""
        with self._lock:
            if listener not in self._listeners:
                self._listeners.append(listener)
            change, current = self._change, self.round
        if change is not None and current is not None and change.round == current.number:
            listener.on_hosts_changed(change.round, removed=change.removed, added=change.added)

    def remove(self, listener: Listener) -> None:
        """Tell it nothing any more."""
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)

    def _leave(self) -> None:
        with self._lock:
            left, self.round = self.round, None
        if left is not None:
            left.close()
        word = WorkerReady(last_round=0 if left is None else left.number, has_state=self.keeps_state)
        self.keeps_state = False
        self._tell(word)

    def _tell(self, word: WorkerMessage) -> None:
        with contextlib.suppress(OSError):  # without a driver this process is about to be ended
            send_message(self._end, word)

    def _give_up_soon(self, over: Round) -> None:
        timer = threading.Timer(GIVING_UP_SECONDS, self._give_up, (over,))
        timer.daemon = True
        timer.start()

    def _give_up(self, over: Round) -> None:
        with self._lock:
            give_up = over.give_up if self.round is over else None
        if give_up is not None:
            give_up("A worker of this round is gone.")

    def _listen(self) -> None:
        while (word := receive_driver_message(self._end)) is not None:
            if isinstance(word, RoundStarted | WorkerDismissed):
                self._begins.put(word)
            elif isinstance(word, RoundEnded):
                with self._lock:
                    self._last_over = word.round
                    over = self.round if self.round is not None and self.round.number == word.round else None
                if over is not None:
                    over.close()
                    self._give_up_soon(over)
            else:
                with self._lock:
                    self._change = word
                    listeners = list(self._listeners)
                for listener in listeners:
                    listener.on_hosts_changed(word.round, removed=word.removed, added=word.added)
        self._begins.put(None)


def membership() -> Membership | None:
    """This process's membership in an elastic job; None if it is in none."""
    global _membership  # one of the pieces of state that the design allows a module
    if _membership is not None and _membership[0] == os.getpid():
        return _membership[1]
    config = environment.read_worker_config()
    if config is None or config.rounds_descriptor is None:
        return None
    _membership = os.getpid(), Membership(socket.socket(fileno=config.rounds_descriptor))
    return _membership[1]


_membership: tuple[int, Membership] | None = None


def _store(address: str, port: int, *, listening: socket.socket | None) -> Any:
    return dist.TCPStore(  # type: ignore[attr-defined]  # public, missing in the stubs
        address,
        port,
        None,
        listening is not None,
        timeout=STORE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=None if listening is None else listening.detach(),
    )

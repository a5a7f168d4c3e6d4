"""One rank's negotiated operations: takes submissions, has them decided, executes what is decided, gives results.

Note [who drives]: messages are taken, and batches executed, by one thread at a time, the one that holds `_driving`.
That is a thread of its own, unless somebody waits in `synchronize`, who then does it himself: nothing is handed over.
The thread waits on `_all`, in which `_links` lies with all connections while it listens. Who drives himself takes
`_links` out, and sets the alarm when he is done: were the thread awake at once, it would wake at every message of a
script that calls one operation after the other, and only be in its way.
"""

import itertools
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from rankless.compat.horovod.common.exceptions import HorovodInternalError
from rankless.compat.horovod.engine.coordinator import ALL_RANKS, MOVING, Coordinator, fusion_limit
from rankless.compat.horovod.engine.coordinator_client import Desk, Ended, Hub, Spoke
from rankless.compat.horovod.engine.execution import DriverContext, Execution
from rankless.compat.horovod.engine.inline_payload import bytes_of, combine, put, rides
from rankless.compat.horovod.engine.messages import Execute, Request
from rankless.compat.horovod.engine.pending_operations import Ticket, Tickets, place_of
from rankless.compat.horovod.engine.rendezvous import Met
from rankless.compat.horovod.engine.requests import UNNAMED, Kind, Submission, kind_of
from rankless.compat.horovod.engine.stall_check import Stalls
from rankless.compat.horovod.engine.timeline import Timeline
from rankless.compat.horovod.engine.timer import Alarm
from rankless.compat.horovod.settings import Settings

SHUT_DOWN = (
    "Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to allreduce, "
    "allgather or broadcast a tensor after one of the ranks finished execution. If the shutdown was caused by an "
    "exception, you should see the exception in the log before the first shutdown message."
)
SWITCH_SECONDS = 2e-4
"""Python's switch interval meanwhile: with its own 5 ms a main thread of pure Python would starve the other."""
JOIN_SECONDS = 10.0
MOVING_KINDS = tuple(map(Kind, MOVING))
LAST_SECONDS = 5.0
"""After a rank has left: for how long the others may still execute what was decided before."""
HAND_OVER_SECONDS = 1e-4
"""So long the thread leaves what is submitted to who will, as a rule, wait for it at once."""
REST_SECONDS = 1e-3
"""After somebody has driven himself, he may come again."""


class OperationScheduler:
    """The operations of one rank, from joining to leaving."""

    def __init__(self, met: Met, *, rank: int, store: Any, settings: Settings) -> None:
        size = len(met.hosts)
        self.timeline = Timeline()
        self.sets: dict[int, tuple[int, ...]] = {ALL_RANKS: tuple(range(size))}
        self._size = size
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._driving = threading.Lock()
        self._tickets = Tickets()
        self._queue: deque[Execute] = deque()
        self._executing: Execute | None = None
        self._last_until = 0.0
        self._handles = itertools.count(1)
        self._unnamed: dict[int, int] = {}
        self._error: HorovodInternalError | None = None
        self._closed = False
        self._links = selectors.EpollSelector()
        self._all = selectors.EpollSelector()
        self._alarm = Alarm()
        self._all.register(self._alarm, selectors.EVENT_READ)
        self._listens = False
        self._desk = self._desk_of(met, rank, settings)
        self._execution = Execution(
            DriverContext(
                rank=rank,
                hosts=met.hosts,
                store=store,
                timeout=timedelta(seconds=settings.timeout_seconds),
                check=self._check,
                activity=self.timeline.activity,
                reduces_by_hosts=settings.reduces_by_hosts,
            )
        )
        self._switch_seconds = sys.getswitchinterval()
        sys.setswitchinterval(min(self._switch_seconds, SWITCH_SECONDS))
        self._thread = threading.Thread(target=self._serve, name="rankless-horovod", daemon=True)
        self._thread.start()

    def new_handle(self) -> int:
        """The number of the next call on this rank."""
        return next(self._handles)

    def new_name(self, set_id: int) -> str:
        """The name of the next operation of a process set that the script does not name: the same on all its ranks, if
        they call such operations in the same order.
        """
        with self._lock:
            count = self._unnamed[set_id] = self._unnamed.get(set_id, 0) + 1
            return f"{UNNAMED}{count}"

    def submit(self, handle: int, submissions: Sequence[Submission]) -> None:
        """Hand in operations, all under one handle. Raises ValueError if one of their names is in use, and
        HorovodInternalError after the end.
        """
        with self._lock:
            if self._error is not None:
                raise HorovodInternalError(*self._error.args)
            ticket = self._tickets.open(handle, submissions)
            ticket.event = _event_of(submissions)
            whole = bool(submissions[0].group) and rides(submissions, self._size)
            for one in submissions:
                # What is no group's is decided by itself: other ranks may hand it in together with others.
                ride = whole if one.group else rides([one], self._size)
                place = place_of(one)
                values = bytes_of(one.tensor) if ride and one.tensor is not None else b""
                self._desk.submit(place, _request(one, place[1], ride), values)
            self._take()
            if not ticket.is_done and (self._queue or not self._listens):
                self._alarm.set(HAND_OVER_SECONDS)

    def knows(self, handle: int) -> bool:
        """Whether a handle has been submitted, and its results not been given."""
        return handle in self._tickets

    def poll(self, handle: int) -> bool:
        """Whether an operation has its result, or its error. Raises KeyError if there is none of this handle."""
        ticket = self._tickets[handle]
        if not ticket.is_done:
            with self._lock:
                self._take()
                if self._queue:
                    self._alarm.set(0)
        return ticket.is_done

    def synchronize(self, handle: int) -> list[Any]:
        """The results of a handle's operations, in their order; the handle is no more.

        Raises KeyError if there is none, and HorovodInternalError if the operation failed.
        """
        ticket = self._tickets[handle]
        while not ticket.is_done:
            if self._driving.acquire(blocking=False):
                with self._by_myself():
                    self._drive(until=ticket)
            else:
                with self._changed:
                    self._changed.wait_for(lambda: ticket.is_done or not self._driving.locked(), timeout=1.0)
        self._tickets.forget(handle)
        if ticket.error is not None:
            raise ticket.error
        if ticket.event is not None:
            torch.cuda.current_stream().wait_event(ticket.event)
        return [ticket.results[place_of(one)[1]] for one in ticket.submissions]

    def give_up(self, why: str) -> None:
        """Let all that waits fail: this rank knows that others will not come."""
        with self._lock:
            if not self._closed:
                self._last_until = 0.0
                self._end(why)
                self._alarm.set(0)

    def close(self) -> None:
        """Leave; what other ranks wait for will not come, and they are told."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._desk.leave()
            if self._error is None:
                self._end("This rank has left.")
        self._alarm.set(0)
        self._execution.close(is_stuck=self._executing is not None)
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_SECONDS)
        if sys.getswitchinterval() == min(self._switch_seconds, SWITCH_SECONDS):
            sys.setswitchinterval(self._switch_seconds)
        self.timeline.stop()
        self._all.close()
        self._links.close()
        self._alarm.close()

    def _desk_of(self, met: Met, rank: int, settings: Settings) -> Desk:
        if rank:
            return Spoke(met.links[0], self._links, capacity=settings.cache_capacity)
        coordinator = Coordinator(
            self._size,
            combine=combine,
            capacity=settings.cache_capacity,
            fusion_bytes=fusion_limit(settings.fusion_bytes, met.hosts.count(met.hosts[0])),
            splits=settings.splits_groups,
            timeline=self.timeline,
        )
        stalls = Stalls(warn_seconds=settings.stall_seconds, shutdown_seconds=settings.stall_shutdown_seconds)
        return Hub(
            met.links,
            self._links,
            coordinator=coordinator,
            timeline=self.timeline,
            stalls=stalls,
            cycle_seconds=settings.cycle_seconds,
        )

    def _serve(self) -> None:
        """The thread's own loop."""
        while not self._closed:
            self._all.select(self._desk.poll_seconds())
            self._alarm.clear()
            if not self._closed and self._driving.acquire(blocking=False):
                try:
                    self._listen()
                    while self._step():
                        pass
                finally:
                    self._driving.release()
                    with self._changed:
                        self._changed.notify_all()

    def _listen(self) -> None:
        """The thread wakes for messages from now on. `_driving` is held."""
        if not self._listens:
            self._listens = True
            self._all.register(self._links.fileno(), selectors.EVENT_READ)

    @contextmanager
    def _by_myself(self) -> Iterator[None]:
        """Within, the thread does not listen, and not for a while after; `_driving` is held, and let go at the end."""
        if self._listens:
            self._listens = False
            self._all.unregister(self._links.fileno())
        try:
            yield
        finally:
            self._driving.release()
            with self._changed:
                self._changed.notify_all()
                if not self._closed:
                    self._alarm.set(0 if self._queue or self._tickets else REST_SECONDS)

    def _drive(self, *, until: Ticket) -> None:
        while not until.is_done:
            if not self._step() and not until.is_done:
                self._links.select(self._desk.poll_seconds())

    def _step(self) -> bool:
        """Take what has come, and execute one batch; whether there was one."""
        with self._lock:
            self._take()
            if not self._queue:
                return False
            execute = self._queue.popleft()
            self._executing = execute
            found = [self._tickets.get((execute.set_id, item.key)) for item in execute.items]
        submissions = {one.submission.key: one.submission for one in found if one is not None}
        tickets = {id(one.ticket): one.ticket for one in found if one is not None}.values()
        keys = [item.key for item in execute.items]
        self.timeline.started(keys)
        try:
            results: Mapping[str, Any] = self._execute(execute, submissions, list(tickets))
        except HorovodInternalError as error:
            results = dict.fromkeys(keys, error)
        self.timeline.finished(keys)
        with self._changed:
            self._executing = None
            for key, result in results.items():
                self._tickets.finish((execute.set_id, key), result)
            self._changed.notify_all()
        return True

    def _execute(
        self, execute: Execute, submissions: Mapping[str, Submission], tickets: Sequence[Ticket]
    ) -> dict[str, Any]:
        events = [ticket.event for ticket in tickets if ticket.event is not None]
        for event in events:
            torch.cuda.current_stream().wait_event(event)
        if events and self.timeline.is_on:
            self.timeline.await_data(_ready(execute, tickets))
        results = self._execution.run(execute, self.sets[execute.set_id], submissions)
        if events:
            done = torch.cuda.current_stream().record_event()
            for ticket in tickets:
                ticket.event = done
        return results

    def _take(self) -> None:
        """Take what has been decided. The lock is held."""
        if self._error is not None:
            return
        try:
            for execute, values in self._desk.told(is_idle=not self._queue and self._executing is None):
                self._deliver(execute, values)
        except Ended as ended:
            self._end(str(ended)) if str(ended) else self._end_in_order()

    def _deliver(self, execute: Execute, values: bytes) -> None:
        """Give the results that are there already, and queue what is to be executed."""
        at = 0
        moves = []
        for item in execute.items:
            place = (execute.set_id, item.key)
            found = self._tickets.get(place)
            kind = kind_of(item.key)
            if not item.error:
                is_queued = not item.rides and kind in MOVING_KINDS
                self.timeline.decided(item.key, kind.value, is_queued=is_queued)
            if item.error:
                self._tickets.finish(place, HorovodInternalError(item.error))
            elif item.rides:
                output = found.submission.output if found is not None else None
                if output is not None:
                    count = output.numel() * output.element_size()
                    put(memoryview(values)[at : at + count], output)
                    at += count
                self._tickets.finish(place, output)
            elif kind not in MOVING_KINDS:
                self._agree(kind, item.details, item.request)
                self._tickets.finish(place, item.details[0] if item.details else None)
            else:
                moves.append(item)
        if moves:
            self._queue.append(execute)
        self._changed.notify_all()

    def _agree(self, kind: Kind, details: tuple[int, ...], request: Request | None) -> None:
        if kind is Kind.ADD_SET and request is not None:
            self.sets[details[0]] = request.ranks
        elif kind is Kind.REMOVE_SET:
            self.sets.pop(details[0], None)
            self._execution.forget(details[0])

    def _end(self, why: str) -> None:
        """Nothing more will be executed. The lock is held."""
        self._error = HorovodInternalError(f"{SHUT_DOWN} {why}")
        self._queue.clear()
        self._tickets.fail_all(self._error)
        self._changed.notify_all()

    def _end_in_order(self) -> None:
        """Some rank has left, and had its last results: what was decided before is executed. The lock is held."""
        self._error = HorovodInternalError(SHUT_DOWN)
        self._last_until = time.monotonic() + LAST_SECONDS
        batches = [*self._queue, *([self._executing] if self._executing is not None else [])]
        decided = {(batch.set_id, item.key) for batch in batches for item in batch.items}
        self._tickets.fail_all(self._error, but=decided)
        self._changed.notify_all()

    def _check(self) -> None:
        """Called while a batch is executed and waits for others. Raises HorovodInternalError after the end."""
        with self._lock:
            self._take()
            if self._error is not None and time.monotonic() > self._last_until:
                raise HorovodInternalError(*self._error.args)


def _request(one: Submission, key: str, ride: bool) -> Request:
    tensor = one.tensor
    return Request(
        kind=one.kind.value,
        key=key,
        set_id=0 if one.kind is Kind.REMOVE_SET else one.set_id,
        dtype="" if tensor is None else str(tensor.dtype).removeprefix("torch."),
        shape=() if tensor is None else tuple(tensor.shape),
        device="cpu" if tensor is None else tensor.device.type,
        reduction=int(one.reduction),
        prescale=one.prescale,
        postscale=one.postscale,
        root=one.set_id if one.kind is Kind.REMOVE_SET else one.root,
        splits=one.splits or (),
        ranks=one.ranks,
        group=one.group,
        group_size=one.group_size,
        rides=ride,
    )


def _ready(execute: Execute, tickets: Sequence[Ticket]) -> dict[str, torch.cuda.Event]:
    """By key, when the tensors of a batch are ready on their device."""
    keys = {item.key for item in execute.items}
    return {
        place_of(one)[1]: ticket.event
        for ticket in tickets
        for one in ticket.submissions
        if ticket.event is not None and place_of(one)[1] in keys
    }


def _event_of(submissions: Sequence[Submission]) -> torch.cuda.Event | None:
    if any(one.tensor is not None and one.tensor.is_cuda for one in submissions):
        event: torch.cuda.Event = torch.cuda.current_stream().record_event()
        return event
    return None

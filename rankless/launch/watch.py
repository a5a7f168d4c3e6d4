"""Watching a run: records in, phases on, until nothing is left to watch."""

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable
from enum import Enum

import msgspec

from rankless.launch.interrupts import Interrupts
from rankless.launch.judge import Verdict, judge
from rankless.launch.parent_process import ParentProcess
from rankless.plan.foreign import Foreign
from rankless.records.channel import receive_records
from rankless.records.events import AnyRecord
from rankless.runtime.lifeline import KILL, signalling

POLL_SECONDS = 0.05
STOP_GRACE_SECONDS = 1.0
INTERRUPT_GRACE_SECONDS = 3.0
KILL_GRACE_SECONDS = 1.0


class Phase(Enum):
    """Where a run is."""

    RUNNING = "running"
    STOPPING = "asked to stop"
    KILLING = "told to be killed"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended: the verdict if it failed by itself, the signal if the agent was told to end it."""

    verdict: Verdict | None = None
    interrupted_by: int | None = None
    parent_exit_code: int | None = None


class Watch:
    """One run, from its start until its workers' parent is gone or beyond asking."""

    def __init__(
        self,
        parent: ParentProcess,
        *,
        interrupts: Interrupts,
        on_record: Callable[[AnyRecord], None],
        on_turn: Callable[[], None],
        foreign: Foreign | None = None,
    ) -> None:
        self._parent = parent
        self._interrupts = interrupts
        self._on_record = on_record
        self._on_turn = on_turn
        self._foreign = foreign
        self._records: list[AnyRecord] = []
        self._phase = Phase.RUNNING
        self._deadline = float("inf")
        self._verdict: Verdict | None = None
        self._interrupted_by: int | None = None

    def run_to_end(self) -> Outcome:
        """Watch until the parent has ended, or does not answer any more."""
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
            selector.register(self._parent.records, selectors.EVENT_READ)
            selector.register(self._interrupts, selectors.EVENT_READ)
            if hasattr(os, "pidfd_open"):
                ended = os.pidfd_open(self._parent.process_id)
                stack.callback(os.close, ended)
                selector.register(ended, selectors.EVENT_READ)
            while True:
                exit_code = self._parent.poll()  # before reading: what it sent before it ended is there now
                self._read_records()
                self._on_turn()
                if exit_code is not None:
                    return self._outcome(exit_code)
                now = time.monotonic()
                signals: list[int | None] = [*self._interrupts.read()]
                for number in signals or [None]:
                    if not self._move_on(number, now):
                        return self._outcome(None)
                selector.select(max(0.0, min(POLL_SECONDS, self._deadline - now)))

    def _read_records(self) -> None:
        records, _ = receive_records(self._parent.records)
        for record in records:
            if self._phase is Phase.RUNNING:
                self._records.append(record)
            self._on_record(record)
        if records and self._phase is Phase.RUNNING:
            known = self._verdict is not None
            self._verdict = judge(self._records)
            if self._verdict is not None and not known:
                self._deadline = time.monotonic() + self._verdict.settling_seconds

    def _move_on(self, number: int | None, now: float) -> bool:
        """Pass to the next phase if it is time, or a signal has come; False when there is none left."""
        if self._phase is Phase.RUNNING and number is not None:
            self._interrupted_by = number
            self._ask_to_end(number, now)
        elif self._phase is Phase.RUNNING and now >= self._deadline:
            self._ask_to_end(signal.SIGTERM, now)
        elif self._phase is Phase.STOPPING and (number is not None or now >= self._deadline):
            self._parent.wake()
            self._enter(Phase.KILLING, KILL, now + KILL_GRACE_SECONDS)
        elif self._phase is Phase.KILLING:
            return now < self._deadline
        return True

    def _ask_to_end(self, number: int, now: float) -> None:
        if self._foreign is not None:
            self._enter(Phase.STOPPING, signalling(number), now + self._foreign.shutdown_seconds)
        elif number == signal.SIGINT:
            self._enter(Phase.STOPPING, signalling(number), now + INTERRUPT_GRACE_SECONDS)
        else:
            self._enter(Phase.STOPPING, signalling(signal.SIGTERM), now + STOP_GRACE_SECONDS)

    def _enter(self, phase: Phase, word: bytes, deadline: float) -> None:
        self._phase, self._deadline = phase, deadline
        self._parent.tell(word)

    def _outcome(self, parent_exit_code: int | None) -> Outcome:
        return Outcome(
            verdict=None if self._interrupted_by is not None else self._verdict,
            interrupted_by=self._interrupted_by,
            parent_exit_code=parent_exit_code,
        )

"""Watching a run: records in, phases on, until nothing is left to watch, here and on other hosts.

Note [asking and cutting]: workers that are to end are asked by a signal. Who waits in a collective for a rank that does
not answer cannot heed it: so half of the grace later the connections between ranks are cut (runtime.connections), and
handlers and `finally` have the other half. If a host is lost it is the other way round: its ranks' connections would be
silent for minutes, so they are cut first, and scripts see what they see when a rank dies on their own host:
RuntimeError. Only half a second later comes the signal, by which a script without a handler ends at once.
"""

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from enum import Enum

import msgspec

from rankless.launch.profile import SignalForwarding
from rankless.launch.rendezvous.messages import HostEnded, StopMode
from rankless.launch.rendezvous.peers import Peers
from rankless.launch.signals import Interrupts
from rankless.launch.supervisor.failure_attribution import ATTRIBUTED_RECORDS, Verdict, attribute_failure
from rankless.launch.supervisor.fork_server_client import ForkServerClient
from rankless.records.channel import receive_records
from rankless.records.events import AnyRecord
from rankless.runtime.spawn_protocol import CUT, KILL, encode_signal

POLL_SECONDS = 0.05
STOP_GRACE_SECONDS = 1.0
INTERRUPT_GRACE_SECONDS = 3.0
KILL_GRACE_SECONDS = 1.0


class Phase(Enum):
    """Where a run is."""

    RUNNING = "running"
    STOPPING = "asked to stop"
    KILLING = "told to be killed"


HOWS: dict[int, StopMode] = {signal.SIGINT: "interrupt"}
SIGNALS: dict[StopMode, int] = {"interrupt": signal.SIGINT, "stop": signal.SIGTERM, "lost": signal.SIGTERM}


class RunOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended: the verdict if it failed by itself, the signal if the agent was told to end it."""

    verdict: Verdict | None = None
    interrupted_by: int | None = None
    fork_server_exit_code: int | None = None


class Supervisor:
    """One run, from its start until its workers' parent is gone or beyond asking."""

    def __init__(
        self,
        parent: ForkServerClient,
        *,
        others: Peers,
        interrupts: Interrupts,
        on_record: Callable[[AnyRecord], None],
        on_turn: Callable[[], Sequence[AnyRecord]],
        forwarding: SignalForwarding | None = None,
    ) -> None:
        self._parent = parent
        self._others = others
        self._interrupts = interrupts
        self._on_record = on_record
        self._on_turn = on_turn
        self._forwarding = forwarding
        self._records: list[AnyRecord] = []
        self._phase = Phase.RUNNING
        self._deadline = float("inf")
        self._turned_at = time.monotonic()
        self._second_word = b""
        self._second_word_at = float("inf")
        self._verdict: Verdict | None = None
        self._interrupted_by: int | None = None
        self._told_end = False

    def run_to_end(self) -> RunOutcome:
        """Watch until the parent has ended, or does not answer any more, and the other hosts have, too."""
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
            selector.register(self._parent.records, selectors.EVENT_READ)
            selector.register(self._interrupts, selectors.EVENT_READ)
            if self._others.fileno() is not None:
                selector.register(self._others, selectors.EVENT_READ)  # type: ignore[arg-type]  # it has a number now
            if hasattr(os, "pidfd_open"):
                ended = os.pidfd_open(self._parent.process_id)
                stack.callback(os.close, ended)
                selector.register(ended, selectors.EVENT_READ)
            while True:
                exit_code = self._parent.poll()  # before reading: what it sent before it ended is there now
                self._read_records()
                self._take_found(self._on_turn())
                now = time.monotonic()
                self._pass_time(now)
                self._hear_others(now)
                if exit_code is not None and self._has_all_ended(exit_code, selector):
                    return self._outcome(exit_code)
                signals: list[int | None] = [*self._interrupts.read()]
                for number in signals or [None]:
                    if not self._move_on(number, now):
                        return self._outcome(None)
                left = self._deadline - now
                selector.select(min(POLL_SECONDS, left) if left > 0 else POLL_SECONDS)

    def _pass_time(self, now: float) -> None:
        """Give those who are to end the seconds again in which this process stood still: a host that is out of breath,
        or a container that was frozen, has held them up, too.
        """
        stood_still = now - self._turned_at - POLL_SECONDS
        self._turned_at = now
        if self._phase is Phase.STOPPING and stood_still > POLL_SECONDS:
            self._deadline += stood_still
            self._second_word_at += stood_still

    def _has_all_ended(self, exit_code: int, selector: selectors.BaseSelector) -> bool:
        """Once the parent has ended: whether nothing lives on the other hosts either."""
        if not self._told_end:
            self._told_end = True
            self._others.ended(HostEnded(fork_server_exit_code=exit_code, interrupted_by=self._interrupted_by))
            for key in list(selector.get_map().values()):
                if isinstance(key.fileobj, int):  # what told of the parent's end does so for ever
                    selector.unregister(key.fileobj)
        return not self._others.are_busy

    def _read_records(self) -> None:
        records, _ = receive_records(self._parent.records)
        self._others.report(records)
        self._take(records)

    def _take_found(self, records: Sequence[AnyRecord]) -> None:
        """What this agent has found itself; nothing of it counts once the run is to end."""
        is_open = self._verdict is None or self._verdict.cause == "timeout"
        if records and self._phase is Phase.RUNNING and is_open:
            self._others.report(records)
            self._take(records)

    def _hear_others(self, now: float) -> None:
        turn = self._others.turn(now)
        self._take(turn.records)
        if turn.stop == "kill" and self._phase is not Phase.KILLING:
            self._end_at_once(now)
        elif turn.stop is not None and self._phase is Phase.RUNNING:
            self._ask_to_end(SIGNALS[turn.stop], now, is_lost=turn.stop == "lost")

    def _take(self, records: Sequence[AnyRecord]) -> None:
        judged = [record for record in records if isinstance(record, ATTRIBUTED_RECORDS)]
        for record in records:
            self._on_record(record)
        if judged and self._phase is Phase.RUNNING:
            self._records += judged
            if self._others.attributes_failures:
                self._judge()

    def _judge(self) -> None:
        before, self._verdict = self._verdict, attribute_failure(self._records, self._others.host_of)
        if self._verdict is not None and self._verdict != before:
            self._deadline = min(self._deadline, time.monotonic() + self._verdict.settling_seconds)

    def _move_on(self, number: int | None, now: float) -> bool:
        """Pass to the next phase if it is time, or a signal has come; False when there is none left."""
        if self._phase is Phase.RUNNING and number is not None:
            self._interrupted_by = number
            self._others.told_to_end(number)
            self._ask_to_end(number, now)
        elif self._phase is Phase.RUNNING and now >= self._deadline:
            is_lost = self._verdict is not None and self._verdict.cause == "host"
            self._ask_to_end(signal.SIGTERM, now, is_lost=is_lost)
        elif self._phase is Phase.STOPPING and number is None and now >= self._second_word_at:
            self._second_word_at = float("inf")
            self._parent.tell(self._second_word)
        elif self._phase is Phase.STOPPING and (number is not None or now >= self._deadline):
            self._end_at_once(now)
        elif self._phase is Phase.KILLING:
            # With nothing left here, another host than host 0 waits for its word: it comes, or the connection ends.
            awaits_word = self._told_end and not self._others.attributes_failures
            return now < self._deadline or (awaits_word and number is None)
        return True

    def _end_at_once(self, now: float) -> None:
        self._parent.wake()
        self._others.stop("kill")
        self._enter(Phase.KILLING, KILL, now + KILL_GRACE_SECONDS)

    def _ask_to_end(self, number: int, now: float, *, is_lost: bool = False) -> None:
        """Ask the workers to end, and cut their connections: see the note at the top."""
        self._others.stop("lost" if is_lost else HOWS.get(number, "stop"))
        grace = INTERRUPT_GRACE_SECONDS if number == signal.SIGINT else STOP_GRACE_SECONDS
        if self._forwarding is not None:
            grace = self._forwarding.grace_seconds
        elif number != signal.SIGINT:
            number = signal.SIGTERM
        words = (encode_signal(number), CUT)
        self._second_word_at = now + grace / 2
        if is_lost:
            words = (CUT, encode_signal(number))
            self._second_word_at = now + min(grace, STOP_GRACE_SECONDS) / 2
        self._second_word = words[1]
        self._enter(Phase.STOPPING, words[0], now + grace)

    def _enter(self, phase: Phase, word: bytes, deadline: float) -> None:
        self._phase, self._deadline = phase, deadline
        self._parent.tell(word)

    def _outcome(self, fork_server_exit_code: int | None) -> RunOutcome:
        return RunOutcome(
            verdict=None if self._interrupted_by is not None else self._verdict,
            interrupted_by=self._interrupted_by,
            fork_server_exit_code=fork_server_exit_code,
        )

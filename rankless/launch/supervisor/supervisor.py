"""Supervises a run: it reads records, moves through the phases of the run's end, and returns the outcome.

Note [signal and shutdown]: the supervisor asks workers to end with a signal. A rank that waits in a collective for
another rank cannot react to it. Before the end of the grace period the supervisor therefore shuts down the connections
between ranks (`runtime.release_waiting_ranks`), and signal handlers and `finally` blocks have the rest: half of the
period, and at most LAST_SECONDS. Until then the collectives work, because the save of a checkpoint may need them. If a
host is lost, the order is reversed: connections to its ranks would be silent for minutes. The supervisor shuts them
down first, and scripts raise `RuntimeError`, as if a rank on their own host had died. The signal follows after half of
the grace period, because it ends a script without a handler at once.
"""

import contextlib
import importlib
import os
import selectors
import signal
import sys
import time
from collections.abc import Sequence
from enum import Enum
from types import ModuleType
from typing import Literal, NamedTuple, Protocol

import msgspec

from rankless.config.cluster_variables import list_warning_signals
from rankless.config.environment import snapshot
from rankless.config.run_config import RunConfig
from rankless.launch.launcher_profile import LauncherProfile, SignalForwarding
from rankless.launch.other_hosts_interface import Peers, StopMode
from rankless.launch.signal_reader import REQUESTED, Interrupts
from rankless.launch.supervisor.fork_server_client import WorkerParent
from rankless.launch.supervisor.verdict_types import (
    ATTRIBUTED_RECORDS,
    SecondaryFailure,
    Verdict,
    WorkerEnds,
    may_be_failure,
)
from rankless.launch.watchdog import load_part
from rankless.records.events import (
    NO_RANK,
    PREEMPTED_EXIT_CODE,
    AnyRecord,
    Exited,
    Notice,
    Raised,
    Started,
    WorkerCut,
    receive_records,
)
from rankless.records.worker_status import PAGE_BYTES, STACKS_REQUEST, read_page
from rankless.runtime.fork_and_spawn_server_messages import CUT, KILL, encode_signal

POLL_SECONDS = 0.05
STOP_GRACE_SECONDS = 1.0
"""After a failure of the run itself. After a signal from outside workers have the run's own grace."""
KILL_GRACE_SECONDS = 1.0
START_GRACE_SECONDS = 3.0
"""After a signal from outside before the first worker of this host has started: there is nothing to save."""
LAST_SECONDS = 5.0
NOTICE_AFTER_SECONDS = 5.0
"""When the terminal says that workers have not ended yet, and for how long they may."""
SAME_STOP_SECONDS = 0.25
"""A second signal within this time belongs to the first: some launchers send a signal to a process in two ways."""
LOADED_AFTER_SECONDS = 10.0
"""How old a run is when the agent loads what its start does not need. A start does not wait for it. Later the
installation may be another version, or its disk may be what the run waits for."""
_NEEDED_LATER = (
    *("supervisor.failure_attribution", "supervisor.failure_report"),
    *(f"watchdog.{name}" for name in ("hang_verdict", "report", "slow_ranks", "stack_classifier", "stacks")),
)
_LOOK_SECONDS = 1.0
"""Between two looks at where stopping workers are."""
_MAX_STACK_BYTES = 1 << 20


class Phase(Enum):
    """The phases of a run; they follow each other in this order."""

    RUNNING = "running"
    STOPPING = "workers have received a signal"
    KILLING = "workers are being killed"


Origin = Literal["outside", "failure", "lost"]
"""What ends a run: a signal to an agent, a failure of a process of the run, or the loss of a host."""
_STOP_SIGNALS: dict[StopMode, int] = {
    "interrupt": signal.SIGINT,
    "terminate": signal.SIGTERM,
    "stop": signal.SIGTERM,
    "lost": signal.SIGTERM,
}
_ORIGINS: dict[StopMode, Origin] = {"interrupt": "outside", "terminate": "outside", "stop": "failure", "lost": "lost"}


class StopTimes(NamedTuple):
    """How long workers have to end after a signal to an agent, and which signals reach them unchanged."""

    grace_seconds: float
    forwarding: SignalForwarding | None
    warnings: tuple[int, ...] = ()
    """Signals that say that the cluster will end the job soon."""
    alike_seconds: float = 0.0
    """How long the others have to end by themselves after a rank that has raised or left, because all do alike."""


def choose_stop_times(config: RunConfig, profile: LauncherProfile) -> StopTimes:
    """Return the times of a run: those of its launcher, if that has some of its own."""
    own = profile.stop_grace_seconds
    return StopTimes(
        config.grace_seconds if own is None else own,
        profile.signal_forwarding,
        () if profile.signal_forwarding is not None else list_warning_signals(snapshot()),
        alike_seconds=config.grace_seconds if config.view.is_logical else 0.0,
    )


class RunObserver(Protocol):
    """What the agent does while the supervisor runs."""

    @property
    def has_processes(self) -> bool:
        """Whether this host has processes beside its workers."""
        ...

    def before_records(self, *, is_settling: bool) -> Sequence[AnyRecord]:
        """Called before records are read. What workers write after a record, they have not written yet.

        Returns records of what has ended on this host besides workers, which may explain the records of workers.

        Args:
            is_settling: Whether all workers have ended, and one of them has lost a connection for an unknown reason.
        """
        ...

    def judge(self, records: Sequence[AnyRecord]) -> Sequence[AnyRecord]:
        """Return new records of this host's workers, which may say that the others continue without one."""
        ...

    def cover_processes(self, records: Sequence[AnyRecord]) -> Sequence[AnyRecord]:
        """Return new records of all hosts, and say in them whether the run continues without a lost process."""
        ...

    def receive(self, record: AnyRecord) -> None:
        """Take a record of a worker."""
        ...

    def tick(self) -> Sequence[AnyRecord]:
        """Called several times a second. Returns records that the agent itself has made."""
        ...


class RunOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended: the verdict if it failed, or the signal that the agent received."""

    verdict: Verdict | None = None
    secondary_failures: tuple[SecondaryFailure, ...] = ()
    """The exceptions of the other ranks, in the order of their ranks."""
    interrupted_by: int | None = None
    is_preempted: bool = False
    """Whether all workers have stopped by themselves, to be started again."""
    cut: tuple[WorkerCut, ...] = ()
    """The workers of all hosts that had not ended when their time was over, if a signal has ended the run."""
    fork_server_exit_code: int | None = None


class StoppingWorkers:
    """The workers that are alive, and about once a second the stack of each while they stop.

    The summary of the run says where a worker was when it was killed. A thread of the worker writes the stack. A worker
    without that thread gets no signal for it: it may be about to end.

    Args:
        ranks: The ranks of this host.
        pages: The descriptor of the memory that each of them shares with the agent; none without a watchdog.
    """

    def __init__(self, ranks: Sequence[int], pages: Sequence[int]) -> None:
        self._ranks = frozenset(ranks)
        self._pages = dict(zip(ranks, pages, strict=False))
        self._process_ids: dict[int, int] = {}
        self._next_look_at = 0.0
        self._is_asked = False
        self._doing: dict[int, str] = {}

    def receive(self, record: AnyRecord) -> None:
        """Take note of the start and of the end of a worker."""
        if record.rank not in self._ranks:
            return
        if isinstance(record, Started):
            self._process_ids[record.rank] = record.pid
        elif isinstance(record, Exited):
            self._process_ids.pop(record.rank, None)

    @property
    def have_started(self) -> bool:
        """Whether a worker is alive."""
        return bool(self._process_ids)

    def handle(self, number: int) -> bool:
        """Return whether a worker has a handler of a signal. Outside of Linux they count as having one."""
        if sys.platform != "linux":
            return True
        return any(number in _list_handled_signals(process_id) for process_id in self._process_ids.values())

    def look(self, now: float) -> None:
        """Read the stacks that have been asked for and, if a second is over, ask again."""
        if now < self._next_look_at:
            return
        self._next_look_at = now + _LOOK_SECONDS
        self._read()
        for rank, process_id in self._process_ids.items():
            if rank in self._pages:
                page = self._pages[rank]
                os.ftruncate(page, PAGE_BYTES)
                os.lseek(page, PAGE_BYTES, os.SEEK_SET)
                load_part("stacks").ask_thread(process_id, read_page(page), STACKS_REQUEST)
        self._is_asked = True

    def cut(self, *, seconds: float) -> list[WorkerCut]:
        """Return a record of each worker that is still alive, `seconds` after the signal."""
        self._read()
        return [
            WorkerCut(rank=rank, time_ns=time.monotonic_ns(), after_seconds=seconds, doing=self._doing.get(rank, ""))
            for rank in sorted(self._process_ids)
        ]

    def _read(self) -> None:
        for rank in self._process_ids if self._is_asked else ():
            if rank not in self._pages:
                continue
            page = self._pages[rank]
            text = os.pread(page, _MAX_STACK_BYTES, PAGE_BYTES).decode(errors="replace")
            frames = load_part("stacks").parse_main_stack(text, read_page(page).main_thread)
            location = load_part("stack_classifier").classify_stack(frames)
            if location.text:
                self._doing[rank] = location.text


def _list_handled_signals(process_id: int) -> Sequence[int]:
    """Return the signals that a process handles; none if it has ended."""
    try:
        with open(f"/proc/{process_id}/status", encoding="ascii", errors="replace") as status:
            masks = [int(line.split()[1], 16) for line in status if line.startswith("SigCgt:")]
    except OSError:
        return ()
    return [number for number in range(1, 65) if any(mask >> (number - 1) & 1 for mask in masks)]


def _load_attribution() -> ModuleType:
    # Imported here: only a run in which something fails needs it.
    return importlib.import_module("rankless.launch.supervisor.failure_attribution")


class Supervisor:
    """One run, from its start until its fork server has ended or no longer answers."""

    def __init__(
        self,
        fork_server: WorkerParent,
        *,
        peers: Peers,
        interrupts: Interrupts,
        observer: RunObserver,
        times: StopTimes,
        stopping: StoppingWorkers,
    ) -> None:
        self._fork_server = fork_server
        self._peers = peers
        self._interrupts = interrupts
        self._observer = observer
        self._times = times
        self._stopping = stopping
        self._records: list[AnyRecord] = []
        self._secondary_failures: dict[int, SecondaryFailure] = {}
        self._phase = Phase.RUNNING
        self._deadline = float("inf")
        self._may_save = False
        self._has_passed = False
        self._stopped_at = self._notice_at = float("inf")
        self._cut: list[WorkerCut] = []
        self._last_tick_at = time.monotonic()
        self._second_command = b""
        self._second_command_at = float("inf")
        self._verdict: Verdict | None = None
        self._interrupted_by: int | None = None
        self._ends = WorkerEnds()
        self._has_sent_end = False
        self._loads_at = self._last_tick_at + LOADED_AFTER_SECONDS
        self._settled_at = float("inf")

    def run_to_end(self) -> RunOutcome:
        """Supervise until the fork server has ended, or no longer answers, and the other hosts have ended too."""
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
            self._register_sources(selector, stack)
            while True:
                exit_code = self._fork_server.poll()  # before reading: its last records have arrived by then
                self._take_records(self._observer.before_records(is_settling=self._settled_at != float("inf")))
                self._take_records(self._judge(receive_records(self._fork_server.records)[0]))
                self._process_local_records(self._observer.tick())
                now = time.monotonic()
                self._extend_deadlines(now)
                self._process_peers(now)
                self._watch_stop(now)
                self._load_rest(now)
                if exit_code is not None and self._has_everything_ended(exit_code, selector) and self._is_settled(now):
                    return self._make_outcome(exit_code)
                signals: list[int | None] = [*self._interrupts.read()]
                for number in self._interrupts.take_passed():
                    if number in self._times.warnings and not self._stopping.handle(number):
                        signals.append(number)
                        continue
                    self._has_passed = True
                    self._fork_server.send(encode_signal(number))
                for ending in signals or [None]:
                    if not self._advance_phase(ending, now):
                        return self._make_outcome(None)
                left = self._deadline - now
                selector.select(min(POLL_SECONDS, left) if left > 0 else POLL_SECONDS)

    def _load_rest(self, now: float) -> None:
        """Import what the start has not needed, once: see LOADED_AFTER_SECONDS."""
        if now > self._loads_at:
            self._loads_at = float("inf")
            for name in _NEEDED_LATER:
                importlib.import_module(f"rankless.launch.{name}")

    def _register_sources(self, selector: selectors.BaseSelector, stack: contextlib.ExitStack) -> None:
        selector.register(self._fork_server.records, selectors.EVENT_READ)
        selector.register(self._interrupts, selectors.EVENT_READ)
        if self._peers.fileno() is not None:
            selector.register(self._peers, selectors.EVENT_READ)  # type: ignore[arg-type]  # fileno is not None here
        if hasattr(os, "pidfd_open"):
            process_descriptor = os.pidfd_open(self._fork_server.process_id)
            stack.callback(os.close, process_descriptor)
            selector.register(process_descriptor, selectors.EVENT_READ)

    def _extend_deadlines(self, now: float) -> None:
        """Extend the grace period by the time in which this process did not run.

        An overloaded host or a frozen container has delayed the workers too.
        """
        delay = now - self._last_tick_at - POLL_SECONDS
        self._last_tick_at = now
        if self._phase is Phase.STOPPING and delay > POLL_SECONDS:
            self._deadline += delay
            self._second_command_at += delay

    def _has_everything_ended(self, exit_code: int, selector: selectors.BaseSelector) -> bool:
        """After the fork server's end: return whether the other hosts have ended too."""
        if not self._has_sent_end:
            self._has_sent_end = True
            self._peers.send_end(fork_server_exit_code=exit_code, interrupted_by=self._interrupted_by)
            for key in list(selector.get_map().values()):
                if isinstance(key.fileobj, int):  # the descriptor of an ended process stays readable
                    selector.unregister(key.fileobj)
        return not self._peers.are_running

    def _is_settled(self, now: float) -> bool:
        """After the end of all workers: return whether no process beside them can still be why a connection was lost.

        A process that fails closes its connections, and ends a little later. Workers may have ended by then.
        """
        verdict = self._verdict
        if verdict is None or verdict.cause != "lost" or not self._observer.has_processes:
            return True
        self._settled_at = min(self._settled_at, now + verdict.settling_seconds)
        return now >= self._settled_at

    def _take_records(self, records: Sequence[AnyRecord]) -> None:
        """Process records of this host, and send them to host 0."""
        self._peers.send_records(records)
        self._process_records(records)

    def _judge(self, records: Sequence[AnyRecord]) -> Sequence[AnyRecord]:
        """Let the observer say of ended workers whether the others continue, as long as the run continues."""
        return self._observer.judge(records) if self._phase is Phase.RUNNING and self._verdict is None else records

    def _process_local_records(self, records: Sequence[AnyRecord]) -> None:
        """Process records that this agent has made itself. They are dropped once the run has a verdict."""
        is_undecided = self._verdict is None or self._verdict.cause == "timeout"
        if records and self._phase is Phase.RUNNING and is_undecided:
            self._peers.send_records(records)
            self._process_records(records)

    def _process_peers(self, now: float) -> None:
        update = self._peers.poll(now)
        self._process_records(self._judge(update.records) if update.records else ())
        if update.stop == "kill" and self._phase is not Phase.KILLING:
            self._kill_workers(now)
        elif update.stop is not None and self._phase is Phase.RUNNING:
            self._stop_workers(_STOP_SIGNALS[update.stop], now, _ORIGINS[update.stop])

    def _process_records(self, records: Sequence[AnyRecord]) -> None:
        if self._phase is Phase.RUNNING:
            records = self._observer.cover_processes(records)
        relevant = [record for record in records if isinstance(record, ATTRIBUTED_RECORDS)]
        for record in records:
            self._observer.receive(record)
            self._stopping.receive(record)
            self._ends.receive(record)
            if isinstance(record, Raised):
                self._secondary_failures[record.rank] = _load_attribution().describe_secondary_failure(record)
            elif isinstance(record, WorkerCut):
                self._cut.append(record)
        if relevant and self._phase is Phase.RUNNING:
            self._records += relevant
            if self._peers.attributes_failures and any(map(may_be_failure, self._records)):
                self._update_verdict()

    def _update_verdict(self) -> None:
        before = self._verdict
        self._verdict = _load_attribution().attribute_failure(self._records, self._peers.host_of)
        if self._verdict is not None and self._verdict != before:
            seconds = self._verdict.settling_seconds
            is_preempted = self._verdict.exit_code == PREEMPTED_EXIT_CODE
            if is_preempted or (self._has_passed and self._verdict.cause == "left"):
                # A script that saves after such a signal may leave with a code: first the ranks that have nothing to
                # save. SIGTERM would end the others within their save.
                seconds = max(seconds, self._times.grace_seconds)
            if self._verdict.cause in ("raised", "left", "exit") and self._verdict.root_cause_rank > 0:
                # Rank 0 writes for all in the logical view, and may still be saving in a `finally`.
                seconds = max(seconds, self._times.alike_seconds)
            self._deadline = min(self._deadline, time.monotonic() + seconds)

    def _advance_phase(self, number: int | None, now: float) -> bool:
        """Enter the next phase at its deadline or on a signal. Returns False when there is no further phase."""
        if self._phase is not Phase.RUNNING and (number == REQUESTED or now < self._stopped_at + SAME_STOP_SECONDS):
            number = None
        if self._phase is Phase.RUNNING and number is not None:
            self._interrupted_by = number
            self._peers.send_interrupt(number)
            self._stop_workers(number, now, "outside")
        elif self._phase is Phase.RUNNING and now >= self._deadline:
            cause = None if self._verdict is None else self._verdict.cause
            origins: dict[str | None, Origin] = {"host": "lost", "interrupted": "outside"}
            self._stop_workers(signal.SIGTERM, now, origins.get(cause, "failure"))
        elif self._phase is Phase.STOPPING and number and self._interrupted_by in (REQUESTED, *self._times.warnings):
            # The cluster ends the job after its warning, or somebody ends a run that has asked itself to stop: now the
            # grace begins.
            self._interrupted_by = number
            self._set_deadlines(now, self._times.grace_seconds, "outside")
        elif self._phase is Phase.STOPPING and number is None and now >= self._second_command_at:
            self._second_command_at = float("inf")
            self._fork_server.send(self._second_command)
        elif self._phase is Phase.STOPPING and (number is not None or now >= self._deadline):
            self._kill_workers(now)
        elif self._phase is Phase.KILLING:
            # A follower without workers waits for host 0's final message, or for the end of the connection.
            waits_for_leader = self._has_sent_end and not self._peers.attributes_failures
            return now < self._deadline or (waits_for_leader and number is None)
        return True

    def _kill_workers(self, now: float) -> None:
        if self._may_save and self._phase is Phase.STOPPING:
            self._take_records(self._stopping.cut(seconds=now - self._stopped_at))
        self._fork_server.wake()
        self._peers.stop_workers("kill")
        self._enter_phase(Phase.KILLING, KILL)
        self._deadline = now + KILL_GRACE_SECONDS

    def _stop_workers(self, number: int, now: float, origin: Origin) -> None:
        """Signal the workers and shut down their connections. See Note [signal and shutdown]."""
        is_interrupt, forwarding = number == signal.SIGINT and origin == "outside", self._times.forwarding
        mode: dict[Origin, StopMode] = {"outside": "interrupt" if is_interrupt else "terminate", "lost": "lost"}
        self._peers.stop_workers(mode.get(origin, "stop"))
        grace_seconds = self._times.grace_seconds if origin == "outside" else STOP_GRACE_SECONDS
        if forwarding is not None:
            grace_seconds = forwarding.grace_seconds
        elif number != signal.SIGINT:
            number = signal.SIGTERM
        self._stopped_at = now
        self._may_save = origin == "outside" and self._stopping.have_started
        if origin == "outside" and not self._may_save:
            grace_seconds = min(grace_seconds, START_GRACE_SECONDS)
        if self._may_save and grace_seconds > NOTICE_AFTER_SECONDS:
            self._notice_at = now + NOTICE_AFTER_SECONDS
        commands = (encode_signal(number), CUT)
        if origin == "lost":
            commands = (CUT, encode_signal(number))
        self._second_command = commands[1]
        self._enter_phase(Phase.STOPPING, commands[0])
        self._set_deadlines(now, grace_seconds, origin)

    def _set_deadlines(self, now: float, grace_seconds: float, origin: Origin) -> None:
        """Give workers a time to end from now on."""
        last_seconds = min(grace_seconds / 2, LAST_SECONDS) if origin == "outside" else grace_seconds / 2
        self._second_command_at = now + grace_seconds - last_seconds
        if origin == "lost":
            self._second_command_at = now + min(grace_seconds, STOP_GRACE_SECONDS) / 2
        self._deadline = now + grace_seconds

    def _watch_stop(self, now: float) -> None:
        """While workers have time to end: see where they are, and say for how long they may."""
        if self._phase is not Phase.STOPPING or not self._may_save:
            return
        self._stopping.look(now)
        if now >= self._notice_at:
            self._notice_at = float("inf")
            text = (
                f"the workers have {self._deadline - now:.0f} s more to end; a second signal to this process ends them "
                "at once"
            )
            self._observer.receive(Notice(rank=NO_RANK, time_ns=time.monotonic_ns(), text=text))

    def _enter_phase(self, phase: Phase, command: bytes) -> None:
        self._phase = phase
        self._fork_server.send(command)

    def _make_outcome(self, fork_server_exit_code: int | None) -> RunOutcome:
        verdict, is_preempted = self._verdict, self._ends.are_preempted
        is_interrupted = self._interrupted_by is not None
        is_complete = (is_interrupted or (verdict is not None and verdict.cause == "interrupted")) and (
            self._ends.are_complete
        )
        if is_interrupted or is_preempted or is_complete:
            verdict = None
        if verdict is not None:
            self._secondary_failures.pop(verdict.root_cause_rank, None)
        return RunOutcome(
            verdict=verdict,
            secondary_failures=tuple(failure for _, failure in sorted(self._secondary_failures.items())),
            interrupted_by=None
            if is_complete
            else self._interrupted_by or (signal.SIGTERM if is_interrupted else None),
            is_preempted=is_preempted,
            cut=tuple(sorted(self._cut, key=lambda record: record.rank)),
            fork_server_exit_code=fork_server_exit_code,
        )

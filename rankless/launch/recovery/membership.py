"""The membership of an elastic job: which workers exist, which are in the round, and what happens next.

`JobMembership` starts nothing and sends nothing. The driver reports events to it, and `decide` returns the actions. See
Note [rounds] in `records.elastic_driver_protocol`.

Note [which workers a round waits for]: after the end of a round, the next one starts when all wanted workers are ready.
It waits for a replacement that is starting, because otherwise all members would have to form a new round a moment
later. After JOIN_TIMEOUT_SECONDS it starts without the late workers, if enough are ready and one of them has the state.
The first round waits for all workers. They get FIRST_JOIN_TIMEOUT_SECONDS to import what the script imports, even if
`elastic_timeout_seconds` is shorter.

Note [which workers are killed]: a survivor that is not ready JOIN_TIMEOUT_SECONDS after the first other survivor with
the state, a dismissed worker that has not ended in that time, and a replacement that is not ready after
FIRST_JOIN_TIMEOUT_SECONDS. The agent of its host kills the worker as soon as it makes no progress. A worker that
computes, or writes a checkpoint, is left alone.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from rankless.config.run_config import Elastic
from rankless.records.elastic_driver_protocol import (
    DriverMessage,
    HostsChanged,
    RankAssignment,
    RoundEnded,
    RoundStarted,
    WorkerDismissed,
    WorkerReady,
    assign_ranks,
)


@dataclass(frozen=True, kw_only=True)
class RankCandidate:
    """The properties of a worker that decide its rank."""

    number: int
    """The worker's number, which never changes: workers are numbered in the order of their start."""
    host: str
    synced_round: int = 0
    """The last round in which it had the state of the job; 0 if there was none."""
    last_round: int = 0
    last_rank: int = -1

    @property
    def seniority(self) -> tuple[int, int, int, int]:
        """A sort key: first the latest state, then the latest round, then the order of earlier ranks."""
        return (-self.synced_round, -self.last_round, self.last_rank, self.number)


def assign_round_ranks(candidates: Iterable[RankCandidate]) -> dict[int, RankAssignment]:
    """Return the rank assignment of each worker by its number.

    Rank 0 has the latest state, so it can broadcast it. Ranks of one host are consecutive. Hosts, and the workers of
    each, are sorted by seniority, so survivors keep their ranks where possible.
    """
    by_host: dict[str, list[RankCandidate]] = {}
    for candidate in sorted(candidates, key=lambda each: each.seniority):
        by_host.setdefault(candidate.host, []).append(candidate)
    ordered = [candidate for on_host in by_host.values() for candidate in on_host]
    assignments = assign_ranks([candidate.host for candidate in ordered])
    return {candidate.number: each for candidate, each in zip(ordered, assignments, strict=True)}


class WorkerState(Enum):
    """The states of a worker."""

    STARTING = "starting"
    READY = "ready"
    IN_ROUND = "in a round"
    DISMISSED = "dismissed"


@dataclass(kw_only=True, eq=False)
class ElasticWorker:
    """One live worker."""

    number: int
    host: str
    slot: int
    """The lowest number that no other live worker of its host had when it started."""
    state: WorkerState = WorkerState.STARTING
    synced_round: int = 0
    """The last round in which it had the state of the job; 0 if there was none."""
    last_round: int = 0
    last_rank: int = -1
    has_state: bool = False
    """Whether its state is that of all ranks of its last round, so it needs no broadcast."""
    ready_since: float = 0.0
    expected_since: float = float("inf")
    """The time from which the driver waits for it to become ready, or to end."""
    is_ending: bool = False
    is_wanted: bool = True
    """Whether there is a slot for it."""
    keeps_state: bool = False
    """Whether it stays without a slot, because no other worker has the state."""

    @property
    def candidate(self) -> RankCandidate:
        """Its properties that decide its rank."""
        return RankCandidate(
            number=self.number,
            host=self.host,
            synced_round=self.synced_round,
            last_round=self.last_round,
            last_rank=self.last_rank,
        )

    @property
    def may_join(self) -> bool:
        """Whether it may be in the next round."""
        return self.is_wanted or self.keeps_state


@dataclass(frozen=True)
class StartAction:
    """Start a worker."""

    worker: ElasticWorker


@dataclass(frozen=True)
class MessageAction:
    """Send a message to a worker."""

    worker: ElasticWorker
    message: DriverMessage


@dataclass(frozen=True)
class KillAction:
    """Kill a worker, unless it computes."""

    worker: ElasticWorker
    reason: str
    """For example "did not call hvd.init for 30 s"."""


Action = StartAction | MessageAction | KillAction


JOIN_TIMEOUT_SECONDS = 30.0
FIRST_JOIN_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class JobFailure:
    """Why the job cannot continue."""

    headline: str
    worker: int | None = None
    """The number of the worker whose failure is the cause, or was the last one."""


@dataclass
class WaitingForWorkers:
    """The phase between two rounds."""

    since: float
    """Infinity until the first call of `decide`."""


@dataclass
class RoundState:
    """A round, from the choice of its members on."""

    number: int
    assignments: Mapping[int, RankAssignment]
    must_sync: bool
    announced: tuple[bool, bool] = (False, False)
    """The changes that the members know of: whether workers are removed, and whether workers are added."""


class JobMembership:
    """Everything that the driver knows about the workers of one job."""

    def __init__(self, elastic: Elastic, *, first_workers: int) -> None:
        self._elastic = elastic
        self._first_workers = first_workers
        self._slots: Mapping[str, int] = {}
        self._hosts_may_change = True
        self._next_number = 0
        self._phase: WaitingForWorkers | RoundState = WaitingForWorkers(float("inf"))
        self._short_since: float | None = None
        self._last_failed: int | None = None
        self._outbox: list[Action] = []
        self.blacklist = Blacklist(elastic.cooldown_range_seconds)
        self.workers: dict[int, ElasticWorker] = {}
        self.round_number = 0
        self.is_finishing = False
        self.failure: JobFailure | None = None

    @property
    def current_round(self) -> RoundState | None:
        """The current round, or None between two rounds."""
        return self._phase if isinstance(self._phase, RoundState) else None

    def set_hosts(self, slots: Mapping[str, int], *, may_change: bool) -> None:
        """Set the hosts and their slots, and whether they may change later."""
        self._slots, self._hosts_may_change = slots, may_change

    def mark_ready(self, number: int, message: WorkerReady, now: float) -> None:
        """A worker waits for the next round."""
        worker = self.workers[number]
        self._leave_round(worker, now)
        worker.state, worker.ready_since, worker.expected_since = WorkerState.READY, now, float("inf")
        worker.has_state = message.has_state and message.last_round == worker.last_round == worker.synced_round > 0

    def mark_synced(self, number: int, round: int) -> None:
        """A worker has the state that all members of a round have."""
        worker = self.workers[number]
        worker.synced_round = max(worker.synced_round, round)
        self.blacklist.clear_early_failures(worker.host)

    def mark_finishing(self, number: int) -> None:
        """A worker's script has reached its end."""
        self.is_finishing = self.is_finishing or self.workers[number].state is not WorkerState.DISMISSED

    def remove_finished(self, number: int) -> None:
        """A worker has ended with exit code 0."""
        self.mark_finishing(number)
        del self.workers[number]

    def remove_failed(self, number: int, now: float, *, is_own: bool, is_lost: bool = False) -> float | None:
        """A worker has ended with another exit code.

        `is_own` means that it failed by its own exception or exit code, not by a signal. `is_lost` means that its host
        was lost. Returns for how many seconds its host is blacklisted from now on, or None.
        """
        worker = self.workers.pop(number)
        self._leave_round(worker, now)
        if worker.state is WorkerState.DISMISSED:
            return None
        self._last_failed = number
        if self.is_finishing and is_own:
            self.failure = JobFailure(headline="failed while the others finished", worker=number)
        has_survivor = any(other.synced_round for other in self.workers.values())
        if worker.synced_round and not has_survivor and not self.is_finishing:
            self.failure = JobFailure(headline="the last worker with the training state failed", worker=number)
        if is_lost:  # the host counts as failed once, with its last worker
            is_last = all(other.host != worker.host for other in self.workers.values())
            return self.blacklist.count_loss(worker.host, now) if is_last else None
        if is_own or not worker.synced_round:
            return self.blacklist.count_failure(worker.host, now, is_own=is_own)
        return None

    def decide(self, now: float) -> list[Action]:
        """Return the actions that are due."""
        if isinstance(self._phase, WaitingForWorkers):
            self._phase.since = min(self._phase.since, now)
        self._choose_wanted()
        actions = [*self._outbox, *self._make_starts(now)]
        self._outbox = []
        actions += self._make_dismissals(now)
        current = self.current_round
        if current is None:
            self._start_round(now)
            actions += self._outbox
            self._outbox = []
        else:
            actions += self._announce_changes(current, now)
        self._check_shortage(now)
        return [*actions, *self._make_kills(now)]

    def _choose_wanted(self) -> None:
        """Mark the live workers that have a slot, in order of seniority."""
        free, room = dict(self._slots), self._max_workers()
        live = sorted(self._live_workers(), key=lambda worker: worker.candidate.seniority)
        for worker in live:
            worker.is_wanted = free.get(worker.host, 0) > 0 and room > 0
            worker.keeps_state = False
            if self.is_finishing and not worker.synced_round and worker.state is not WorkerState.IN_ROUND:
                worker.is_wanted = False
            if worker.is_wanted:
                free[worker.host] -= 1
                room -= 1
        if live and live[0].synced_round and not any(each.synced_round for each in live if each.is_wanted):
            live[0].keeps_state = not live[0].is_wanted

    def _max_workers(self) -> float:
        return float("inf") if self._elastic.max_workers is None else self._elastic.max_workers

    def _live_workers(self) -> list[ElasticWorker]:
        return [worker for worker in self.workers.values() if worker.state is not WorkerState.DISMISSED]

    def _make_starts(self, now: float) -> Iterator[Action]:
        """Start a new worker for each free slot."""
        room = self._max_workers() - sum(worker.is_wanted for worker in self._live_workers())
        for host, slots in self._slots.items():
            wanted = sum(worker.is_wanted for worker in self._live_workers() if worker.host == host)
            while wanted < slots and room > 0 and not self.is_finishing and not self.blacklist.has(host, now):
                taken = {worker.slot for worker in self.workers.values() if worker.host == host}
                slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
                worker = ElasticWorker(number=self._next_number, host=host, slot=slot, expected_since=now)
                self.workers[worker.number] = worker
                self._next_number += 1
                wanted, room = wanted + 1, room - 1
                yield StartAction(worker)

    def _make_dismissals(self, now: float) -> Iterator[Action]:
        for worker in self._live_workers():
            if worker.state is WorkerState.READY and not worker.may_join:
                worker.state, worker.expected_since = WorkerState.DISMISSED, now
                yield MessageAction(worker, WorkerDismissed())

    def _start_round(self, now: float) -> None:
        """Start the next round if it is time. See Note [which workers a round waits for]."""
        assert isinstance(self._phase, WaitingForWorkers)
        candidates = [worker for worker in self._live_workers() if worker.may_join]
        ready = [worker for worker in candidates if worker.state is WorkerState.READY]
        if not ready or sum(worker.is_wanted for worker in ready) < self._min_workers():
            return
        may_wait = now - self._phase.since < JOIN_TIMEOUT_SECONDS
        has_state = any(worker.synced_round for worker in ready)
        if len(ready) < len(candidates) and (may_wait or not has_state):
            return
        limit = self._elastic.reset_limit
        if limit is not None and self.round_number > limit:
            headline = f"the reset limit of {limit} has been reached"
            self.failure = JobFailure(headline=headline, worker=self._last_failed)
            return
        self.round_number += 1
        assignments = assign_round_ranks(worker.candidate for worker in ready)
        must_sync = not all(worker.has_state for worker in ready)
        self._phase = RoundState(number=self.round_number, assignments=assignments, must_sync=must_sync)
        for worker in sorted(ready, key=lambda worker: assignments[worker.number].rank):
            self._send_round_start(worker, self._phase)

    def _min_workers(self) -> int:
        if self.is_finishing:
            return 1
        return self._elastic.min_workers if self.round_number else self._first_workers

    def _send_round_start(self, worker: ElasticWorker, current: RoundState) -> None:
        assignment = current.assignments[worker.number]
        worker.state = WorkerState.IN_ROUND
        worker.last_round, worker.last_rank = current.number, assignment.rank
        message = RoundStarted(round=current.number, assignment=assignment, must_sync=current.must_sync)
        self._outbox.append(MessageAction(worker, message))

    def _leave_round(self, leaver: ElasticWorker, now: float) -> None:
        """End the round if the leaver is a member, and inform the other members."""
        current = self.current_round
        if current is None or leaver.number not in current.assignments:
            return
        self._phase = WaitingForWorkers(now)
        for worker in self._live_workers():
            is_informed = worker.state is WorkerState.IN_ROUND and worker.last_round == current.number
            if is_informed and worker is not leaver:
                worker.expected_since = now
                self._outbox.append(MessageAction(worker, RoundEnded(round=current.number)))

    def _announce_changes(self, current: RoundState, now: float) -> Iterator[Action]:
        """Inform the members once if some of them are removed, or other workers wait to join."""
        members = [worker for worker in self._live_workers() if worker.number in current.assignments]
        outside = [
            worker for worker in self._live_workers() if worker.number not in current.assignments and worker.is_wanted
        ]
        # A worker that only keeps the state stays until other members of the round have it.
        has_wanted = any(worker.is_wanted for worker in members)
        removed = not all(worker.is_wanted or (worker.keeps_state and has_wanted) for worker in members)
        waiting = [worker for worker in outside if worker.state is WorkerState.READY]
        is_overdue = any(now - worker.ready_since > JOIN_TIMEOUT_SECONDS for worker in waiting)
        added = bool(waiting) and (len(waiting) == len(outside) or is_overdue)
        removed, added = removed or current.announced[0], added or current.announced[1]
        if (removed, added) != current.announced:
            current.announced = (removed, added)
            for worker in members:
                yield MessageAction(worker, HostsChanged(round=current.number, removed=removed, added=added))

    def _make_kills(self, now: float) -> Iterator[Action]:
        """Kill late workers. See Note [which workers are killed]."""
        members = () if self.current_round is None else self.current_round.assignments
        ready_times = [
            worker.ready_since
            for worker in self._live_workers()
            if worker.synced_round and (worker.state is WorkerState.READY or worker.number in members)
        ]
        for worker in self.workers.values():
            since, timeout = worker.expected_since, JOIN_TIMEOUT_SECONDS
            reason = "did not call hvd.init again"
            if worker.state is WorkerState.STARTING:
                timeout, reason = FIRST_JOIN_TIMEOUT_SECONDS, "did not call hvd.init"
            elif worker.state is WorkerState.DISMISSED:
                reason = "did not end"
            else:
                since = max(since, min(ready_times, default=float("inf")))
            if self.round_number and not worker.is_ending and now - since > timeout:
                worker.is_ending = True
                yield KillAction(worker, f"{reason} for {now - since:.0f} s")

    def _check_shortage(self, now: float) -> None:
        """Fail the job if there have been too few workers, or no round, for too long."""
        wanted = sum(worker.is_wanted for worker in self._live_workers())
        is_short = wanted < self._min_workers() and not self.is_finishing
        is_waiting = isinstance(self._phase, WaitingForWorkers) and not self.is_finishing
        if not is_short and not is_waiting:
            self._short_since = None
            return
        if self._short_since is None:
            self._short_since = now
        limit = self._elastic.elastic_timeout_seconds
        if self.round_number == 0 and not is_short:
            limit = max(limit, FIRST_JOIN_TIMEOUT_SECONDS)
        is_hopeless = is_short and not self._may_get_more(now)
        if self.failure is None and (now - self._short_since > limit or is_hopeless):
            self.failure = JobFailure(headline=self._describe_shortage(wanted, is_short, now), worker=self._last_failed)

    def _may_get_more(self, now: float) -> bool:
        listed = [host for host in self._slots if self.blacklist.has(host, now)]
        if any(self.blacklist.may_release(host) for host in listed):
            return True
        # Without a live worker, and with every host listed permanently, another host would hardly help.
        return self._hosts_may_change and (
            bool(self._live_workers()) or len(listed) < len(self._slots) or not self._slots
        )

    def _describe_shortage(self, wanted: int, is_short: bool, now: float) -> str:
        minimum = self._min_workers()
        if is_short:
            return (
                f"there are {wanted} workers, and {minimum} are needed (--min-np); none joined in "
                f"{self._elastic.elastic_timeout_seconds:g} s (--elastic-timeout)"
                if self._may_get_more(now)
                else f"there are {wanted} workers, and {minimum} are needed (--min-np); no host has a slot for another"
            )
        option = " (--elastic-timeout)" if self.round_number else ""
        late = self._describe_late_workers() or "nothing"
        return f"round {self.round_number + 1} did not start in time{option}; it waited for {late}"

    def describe_waiting(self) -> tuple[float, str] | None:
        """Return since when and for what the next round waits.

        Returns None during a round, and at the end of the job.
        """
        if not isinstance(self._phase, WaitingForWorkers) or self.is_finishing:
            return None
        wanted, minimum = sum(worker.is_wanted for worker in self._live_workers()), self._min_workers()
        what = self._describe_late_workers()
        if wanted < minimum:
            what = f"hosts with slots for {minimum - wanted} more workers" + (f", and {what}" if what else "")
        return (self._phase.since, f"round {self.round_number + 1} waits for {what}") if what else None

    def _describe_late_workers(self) -> str:
        late = [worker for worker in self._live_workers() if worker.state is not WorkerState.READY]
        names = ", ".join(f"{worker.number} ({worker.host})" for worker in late)
        return f"worker{'s' if len(late) > 1 else ''} {names} to call hvd.init" if late else ""


MAX_FAILURES = 3
"""After so many failures a host is blacklisted."""
LOST_HOST_SECONDS = 10.0
"""How long a host gets no workers after its first loss: it may be about to boot. The time grows with each loss."""


@dataclass
class _HostRecord:
    early_failures: int = 0
    own_failures: int = 0
    times_listed: int = 0
    listed_until: float = 0.0


class Blacklist:
    """Counts the failures of each host.

    `cooldown` is the duration of a host's first listing in seconds, and the longest duration. Each further listing
    doubles it. Without a cooldown a listing is permanent.
    """

    def __init__(self, cooldown: tuple[float, float] | None) -> None:
        self._cooldown = cooldown
        self._hosts: dict[str, _HostRecord] = {}

    def count_failure(self, host: str, now: float, *, is_own: bool) -> float | None:
        """Count a worker that failed on this host, by a fault of its own or before it took part in a round.

        Returns for how many seconds this blacklists the host, or None.
        """
        record = self._hosts.setdefault(host, _HostRecord())
        if is_own:
            record.own_failures += 1
        else:
            record.early_failures += 1
        if max(record.own_failures, record.early_failures) < MAX_FAILURES:
            return None
        record.own_failures = record.early_failures = 0
        record.times_listed += 1
        seconds = float("inf")
        if self._cooldown is not None:
            minimum, maximum = self._cooldown
            seconds = min(maximum, minimum * 2 ** (record.times_listed - 1))
        record.listed_until = now + seconds
        return seconds

    def count_loss(self, host: str, now: float) -> float | None:
        """Count the loss of a host, or a failed attempt to reach it. It gets no workers for a while.

        Returns for how many seconds this blacklists the host, or None.
        """
        seconds = self.count_failure(host, now, is_own=False)
        if seconds is None:
            record = self._hosts[host]
            record.listed_until = now + LOST_HOST_SECONDS * record.early_failures
        return seconds

    def clear_early_failures(self, host: str) -> None:
        """Forget the workers that failed early on this host, because a worker there takes part in a round."""
        if host in self._hosts:
            self._hosts[host].early_failures = 0

    def has(self, host: str, now: float) -> bool:
        """Whether a host gets no workers now."""
        return host in self._hosts and now < self._hosts[host].listed_until

    def may_release(self, host: str) -> bool:
        """Whether a listed host will get workers again."""
        return self._hosts[host].listed_until != float("inf")

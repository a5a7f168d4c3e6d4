"""The roll of an elastic job: which workers there are, who is in the round, what is to happen next.

It starts nothing and sends nothing: it is told what has happened, and `turn` answers what is to be done. See Note
[rounds] in `records.elastic_messages`.

Note [who is waited for]: once a round is over, the next begins when all workers that are wanted are ready. A
replacement that is on its way is waited for, or everybody would have to meet again a moment later; but who is not there
after PATIENCE_SECONDS is left for a round after it, if there are enough without it and one of them has the state.
Before the first round everybody is waited for, and given FIRST_ROUND_SECONDS to import what the script imports, however
short the time is for which there may be too few workers.

Note [who is ended]: a survivor that has not come PATIENCE_SECONDS after the first other one that has the state, a
dismissed worker that has not ended in that time, and a replacement that has not come after FIRST_ROUND_SECONDS. Its
crew ends it if it stands still; one that computes, or writes a checkpoint, is left alone, and is late.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rankless.config.elastic import Elastic
from rankless.launch.elastic.blacklist import Blacklist
from rankless.launch.elastic.member import Action, ElasticWorker, End, Start, Status, Tell
from rankless.launch.elastic.rank_assignment import assignments
from rankless.records.elastic_messages import (
    HostsChanged,
    RankAssignment,
    RoundEnded,
    RoundStarted,
    WorkerDismissed,
    WorkerReady,
)

PATIENCE_SECONDS = 30.0
FIRST_ROUND_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class JobFailure:
    """The job cannot go on."""

    headline: str
    culprit: int | None = None
    """The number of the worker that has failed last, if that is why."""


@dataclass
class WaitingForWorkers:
    """Workers are awaited for the next round."""

    since: float
    """Infinity until the first turn."""


@dataclass
class RoundState:
    """A round, from the moment that its members are chosen."""

    number: int
    assignments: Mapping[int, RankAssignment]
    must_sync: bool
    untold: list[ElasticWorker] = field(default_factory=list)
    """Members that wait for rank 0's store."""
    noticed: tuple[bool, bool] = (False, False)
    """What the members have been told of changes: removed, added."""


class JobMembership:
    """All that is known of the workers of one job."""

    def __init__(self, elastic: Elastic, *, first_workers: int) -> None:
        self._elastic = elastic
        self._first_workers = first_workers
        self._slots: Mapping[str, int] = {}
        self._may_change = True
        self._number = 0
        self._phase: WaitingForWorkers | RoundState = WaitingForWorkers(float("inf"))
        self._short_since: float | None = None
        self._last_failed: int | None = None
        self._outbox: list[Action] = []
        self.blacklist = Blacklist(elastic.cooldown_range_seconds)
        self.workers: dict[int, ElasticWorker] = {}
        self.round = 0
        self.is_finishing = False
        self.trouble: JobFailure | None = None

    @property
    def seating(self) -> RoundState | None:
        """The round, unless workers gather for the next."""
        return self._phase if isinstance(self._phase, RoundState) else None

    def hosts_are(self, slots: Mapping[str, int], *, may_change: bool) -> None:
        """The hosts and their slots; whether others may come."""
        self._slots, self._may_change = slots, may_change

    def ready(self, number: int, word: WorkerReady, now: float) -> None:
        """A worker waits for the next round."""
        worker = self.workers[number]
        self._leave(worker, now)
        worker.status, worker.ready_since, worker.owes_since = Status.READY, now, float("inf")
        worker.has_state = word.has_state and word.last_round == worker.last_round == worker.synced_round > 0

    def serving(self, number: int, round: int, port: int) -> None:
        """Rank 0 has opened the round's store."""
        seating = self.seating
        if seating is None or seating.number != round or self.workers[number].last_rank != 0:
            return
        for worker in seating.untold:
            self._tell_begin(worker, seating, port)
        seating.untold.clear()

    def synced(self, number: int, round: int) -> None:
        """A worker has the state that all of a round have."""
        worker = self.workers[number]
        worker.synced_round = max(worker.synced_round, round)
        self.blacklist.succeeded(worker.host)

    def finishes(self, number: int) -> None:
        """A worker's script has come to its end."""
        self.is_finishing = self.is_finishing or self.workers[number].status is not Status.DISMISSED

    def finished(self, number: int) -> None:
        """A worker has ended with 0."""
        self.finishes(number)
        del self.workers[number]

    def failed(self, number: int, now: float, *, is_own: bool, is_lost: bool = False) -> float | None:
        """A worker has ended otherwise; `is_own`: by an exception or an exit code of its own, not by a signal;
        `is_lost`: with its host. If its host gets no workers from now on, for how many seconds.
        """
        worker = self.workers.pop(number)
        self._leave(worker, now)
        if worker.status is Status.DISMISSED:
            return None
        self._last_failed = number
        if self.is_finishing and is_own:
            self.trouble = JobFailure(headline="failed while the others finished", culprit=number)
        if any(other.synced_round for other in self.workers.values()) or self.is_finishing:
            pass
        elif worker.synced_round:
            self.trouble = JobFailure(headline="was the last that had the state of the training", culprit=number)
        if is_lost:  # the host has failed once, with its last worker
            is_last = all(other.host != worker.host for other in self.workers.values())
            return self.blacklist.lost(worker.host, now) if is_last else None
        if is_own or not worker.synced_round:
            return self.blacklist.failed(worker.host, now, is_own=is_own)
        return None

    def turn(self, now: float) -> list[Action]:
        """What is to be done now."""
        if isinstance(self._phase, WaitingForWorkers):
            self._phase.since = min(self._phase.since, now)
        self._choose_wanted()
        actions = [*self._outbox, *self._starts(now)]
        self._outbox = []
        actions += self._dismissals(now)
        seating = self.seating
        if seating is None:
            self._begin(now)
            actions += self._outbox
            self._outbox = []
        else:
            actions += self._notices(seating, now)
        self._look_for_trouble(now)
        return [*actions, *self._ends(now)]

    def _choose_wanted(self) -> None:
        """Of the living workers, those for which there is a slot, seniors first."""
        left, room = dict(self._slots), self._room()
        living = sorted(self._living(), key=lambda worker: worker.member.seniority)
        for worker in living:
            worker.is_wanted = left.get(worker.host, 0) > 0 and room > 0
            worker.keeps_state = False
            if self.is_finishing and not worker.synced_round and worker.status is not Status.IN_ROUND:
                worker.is_wanted = False
            if worker.is_wanted:
                left[worker.host] -= 1
                room -= 1
        if living and living[0].synced_round and not any(each.synced_round for each in living if each.is_wanted):
            living[0].keeps_state = not living[0].is_wanted

    def _room(self) -> float:
        return float("inf") if self._elastic.max_workers is None else self._elastic.max_workers

    def _living(self) -> list[ElasticWorker]:
        return [worker for worker in self.workers.values() if worker.status is not Status.DISMISSED]

    def _starts(self, now: float) -> Iterator[Action]:
        """A new worker for each slot that is free."""
        room = self._room() - sum(worker.is_wanted for worker in self._living())
        for host, slots in self._slots.items():
            wanted = sum(worker.is_wanted for worker in self._living() if worker.host == host)
            while wanted < slots and room > 0 and not self.is_finishing and not self.blacklist.has(host, now):
                taken = {worker.slot for worker in self.workers.values() if worker.host == host}
                slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
                worker = ElasticWorker(number=self._number, host=host, slot=slot, owes_since=now)
                self.workers[worker.number] = worker
                self._number += 1
                wanted, room = wanted + 1, room - 1
                yield Start(worker)

    def _dismissals(self, now: float) -> Iterator[Action]:
        seated = () if self.seating is None else self.seating.untold
        for worker in self._living():
            if worker.status is Status.READY and not worker.may_join and worker not in seated:
                worker.status, worker.owes_since = Status.DISMISSED, now
                yield Tell(worker, WorkerDismissed())

    def _begin(self, now: float) -> None:
        """Begin the next round if it is time."""
        assert isinstance(self._phase, WaitingForWorkers)
        candidates = [worker for worker in self._living() if worker.may_join]
        ready = [worker for worker in candidates if worker.status is Status.READY]
        if not ready or sum(worker.is_wanted for worker in ready) < self._needed():
            return
        is_patient = now - self._phase.since < PATIENCE_SECONDS
        has_state = any(worker.synced_round for worker in ready)
        if len(ready) < len(candidates) and (is_patient or not has_state):
            return
        limit = self._elastic.reset_limit
        if limit is not None and self.round > limit:
            self.trouble = JobFailure(
                headline=f"the reset limit of {limit} has been reached", culprit=self._last_failed
            )
            return
        self.round += 1
        found = assignments(worker.member for worker in ready)
        lead, *others = sorted(ready, key=lambda worker: found[worker.number].rank)
        self._phase = RoundState(
            number=self.round,
            assignments=found,
            must_sync=not all(worker.has_state for worker in ready),
            untold=others,
        )
        self._tell_begin(lead, self._phase, None)

    def _needed(self) -> int:
        if self.is_finishing:
            return 1
        return self._elastic.min_workers if self.round else self._first_workers

    def _tell_begin(self, worker: ElasticWorker, seating: RoundState, port: int | None) -> None:
        assignment = seating.assignments[worker.number]
        worker.status = Status.IN_ROUND
        worker.last_round, worker.last_rank = seating.number, assignment.rank
        word = RoundStarted(round=seating.number, assignment=assignment, port=port, must_sync=seating.must_sync)
        self._outbox.append(Tell(worker, word))

    def _leave(self, leaver: ElasticWorker, now: float) -> None:
        """The round is over if the leaver was in it: who is in it is told, who was not yet told is ready still."""
        seating = self.seating
        if seating is None or leaver.number not in seating.assignments:
            return
        self._phase = WaitingForWorkers(now)
        for worker in self._living():
            told = worker.status is Status.IN_ROUND and worker.last_round == seating.number
            if told and worker is not leaver:
                worker.owes_since = now
                self._outbox.append(Tell(worker, RoundEnded(round=seating.number)))

    def _notices(self, seating: RoundState, now: float) -> Iterator[Action]:
        """Tell the members once if some of them are to go, or others wait to come in."""
        members = [worker for worker in self._living() if worker.number in seating.assignments]
        outside = [worker for worker in self._living() if worker.number not in seating.assignments and worker.is_wanted]
        # Who keeps the state stays for as long as others in the round have yet to get it.
        awaited = any(worker.is_wanted for worker in members)
        removed = not all(worker.is_wanted or (worker.keeps_state and awaited) for worker in members)
        waiting = [worker for worker in outside if worker.status is Status.READY]
        is_urgent = any(now - worker.ready_since > PATIENCE_SECONDS for worker in waiting)
        added = bool(waiting) and (len(waiting) == len(outside) or is_urgent)
        removed, added = removed or seating.noticed[0], added or seating.noticed[1]
        if (removed, added) != seating.noticed and not seating.untold:
            seating.noticed = (removed, added)
            for worker in members:
                yield Tell(worker, HostsChanged(round=seating.number, removed=removed, added=added))

    def _ends(self, now: float) -> Iterator[Action]:
        """See Note [who is ended]."""
        seated = () if self.seating is None else self.seating.assignments
        came = [
            worker.ready_since
            for worker in self._living()
            if worker.synced_round and (worker.status is Status.READY or worker.number in seated)
        ]
        for worker in self.workers.values():
            since, patience = worker.owes_since, PATIENCE_SECONDS
            owes = "did not come to hvd.init again"
            if worker.status is Status.STARTING:
                patience, owes = FIRST_ROUND_SECONDS, "did not come to hvd.init"
            elif worker.status is Status.DISMISSED:
                owes = "did not end"
            else:
                since = max(since, min(came, default=float("inf")))
            if self.round and not worker.is_to_end and now - since > patience:
                worker.is_to_end = True
                yield End(worker, f"{owes} for {now - since:.0f} s")

    def _look_for_trouble(self, now: float) -> None:
        """Whether there have been too few workers for too long."""
        wanted = sum(worker.is_wanted for worker in self._living())
        is_short = wanted < self._needed() and not self.is_finishing
        waits = isinstance(self._phase, WaitingForWorkers) and not self.is_finishing
        if not is_short and not waits:
            self._short_since = None
            return
        if self._short_since is None:
            self._short_since = now
        limit = self._elastic.elastic_timeout_seconds
        if self.round == 0 and not is_short:
            limit = max(limit, FIRST_ROUND_SECONDS)
        if self.trouble is None and (now - self._short_since > limit or (is_short and not self._may_get_more(now))):
            self.trouble = JobFailure(headline=self._shortage(wanted, is_short, now), culprit=self._last_failed)

    def _may_get_more(self, now: float) -> bool:
        listed = [host for host in self._slots if self.blacklist.has(host, now)]
        if any(self.blacklist.may_release(host) for host in listed):
            return True
        # With nobody left and every host listed for good, another host would hardly mend it.
        return self._may_change and (bool(self._living()) or len(listed) < len(self._slots) or not self._slots)

    def _shortage(self, wanted: int, is_short: bool, now: float) -> str:
        least = self._needed()
        if is_short:
            return (
                f"there are {wanted} workers, and {least} are needed (--min-np); none came in "
                f"{self._elastic.elastic_timeout_seconds:g} s (--elastic-timeout)"
                if self._may_get_more(now)
                else f"there are {wanted} workers, and {least} are needed (--min-np); no host has a slot for another"
            )
        option = " (--elastic-timeout)" if self.round else ""
        return f"round {self.round + 1} did not begin in time{option}; awaited: {self._late() or 'nobody'}"

    def awaited(self) -> tuple[float, str] | None:
        """Since when, and for what, the next round waits; None while a round lasts, and at the end of the job."""
        if not isinstance(self._phase, WaitingForWorkers) or self.is_finishing:
            return None
        wanted, least = sum(worker.is_wanted for worker in self._living()), self._needed()
        what = self._late()
        if wanted < least:
            what = f"hosts with slots for {least - wanted} more workers" + (f", and {what}" if what else "")
        return (self._phase.since, f"round {self.round + 1} waits for {what}") if what else None

    def _late(self) -> str:
        late = [worker for worker in self._living() if worker.status is not Status.READY]
        names = ", ".join(f"{worker.number} ({worker.host})" for worker in late)
        return f"worker{'s' if len(late) > 1 else ''} {names} to call hvd.init" if late else ""

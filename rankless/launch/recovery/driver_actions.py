"""A worker of an elastic job as the driver knows it, its rank in a round, and the driver's actions on workers."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from rankless.records.elastic_messages import DriverMessage, RankAssignment, assign_ranks


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

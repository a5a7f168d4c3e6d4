"""Assigns ranks to the members of a round."""

from collections.abc import Iterable
from dataclasses import dataclass

from rankless.records.elastic_messages import RankAssignment, assign_ranks


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

"""Who has which rank in a round."""

from collections.abc import Iterable
from dataclasses import dataclass

from rankless.config.rank_layout import assign_ranks
from rankless.records.elastic_messages import RankAssignment


@dataclass(frozen=True, kw_only=True)
class Member:
    """What counts of a worker for its rank."""

    number: int
    """Its own, which it keeps: workers are numbered as they are started."""
    host: str
    synced_round: int = 0
    """The last round in which it had the state of all; 0: it never had."""
    last_round: int = 0
    last_rank: int = -1

    @property
    def seniority(self) -> tuple[int, int, int, int]:
        """The smaller the senior: who has the latest state is first, and who was before others stays before them."""
        return (-self.synced_round, -self.last_round, self.last_rank, self.number)


def assignments(members: Iterable[Member]) -> dict[int, RankAssignment]:
    """The seat of each member, by its number.

    Rank 0 has the latest state, so it can give it to the others. Ranks of one host follow each other; hosts, and
    workers on each, stand in the order of seniority, so who survives keeps its rank where it can.
    """
    hosts: dict[str, list[Member]] = {}
    for member in sorted(members, key=lambda member: member.seniority):
        hosts.setdefault(member.host, []).append(member)
    seated = [member for own in hosts.values() for member in own]
    found = assign_ranks([member.host for member in seated])
    return {member.number: assignment for member, assignment in zip(seated, found, strict=True)}

"""How the ranks of a process set are distributed over hosts."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class HostLayout:
    """One rank's position in a process set with equally many ranks on each host."""

    host_index: int
    host_count: int
    local_index: int
    ranks: tuple[int, ...]
    """The ranks of its host, by local index."""


def compute_host_layout(members: Sequence[int], hosts: Sequence[str], rank: int) -> HostLayout | None:
    """Return a rank's position in a process set, or None if hosts have different numbers of its ranks, or one each.

    `hosts[r]` names the host of rank r.
    """
    by_host: dict[str, list[int]] = {}
    for member in members:
        by_host.setdefault(hosts[member], []).append(member)
    local_ranks = by_host[hosts[rank]]
    if len(local_ranks) == 1 or any(len(ranks) != len(local_ranks) for ranks in by_host.values()):
        return None
    return HostLayout(list(by_host).index(hosts[rank]), len(by_host), local_ranks.index(rank), tuple(local_ranks))

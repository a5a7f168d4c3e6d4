"""Where the ranks of a process set are: how many on each host, and this one among them."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """One rank's place among hosts that have equally many ranks of a process set each."""

    host: int
    host_count: int
    local_place: int
    ranks: tuple[int, ...]
    """Those of its host, in the order of their places there."""


def layout_of(members: Sequence[int], hosts: Sequence[str], rank: int) -> Layout | None:
    """The layout of a process set, seen by a rank; None if hosts have different numbers of its ranks, or one each.

    `hosts[r]` names the host of rank r.
    """
    by_host: dict[str, list[int]] = {}
    for member in members:
        by_host.setdefault(hosts[member], []).append(member)
    here = by_host[hosts[rank]]
    if len(here) == 1 or any(len(ranks) != len(here) for ranks in by_host.values()):
        return None
    return Layout(list(by_host).index(hosts[rank]), len(by_host), here.index(rank), tuple(here))

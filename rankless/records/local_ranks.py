"""The local ranks of a job, within each host, and its cross ranks: among the workers of equal local rank."""

from collections import Counter
from collections.abc import Hashable, Sequence

from rankless.records.elastic_messages import RankAssignment


def assign_ranks(hosts: Sequence[Hashable]) -> list[RankAssignment]:
    """Return the assignment of every rank. `hosts` has each rank's host, in the order of ranks."""
    sizes = Counter(hosts)
    # For each local rank: the hosts that have a rank of that number, each with its index among them.
    peers = [
        {host: index for index, host in enumerate(host for host in sizes if sizes[host] > local_rank)}
        for local_rank in range(max(sizes.values()))
    ]
    assigned: Counter[Hashable] = Counter()
    found = []
    for rank, host in enumerate(hosts):
        local_rank = assigned[host]
        assigned[host] += 1
        found.append(
            RankAssignment(
                rank=rank,
                size=len(hosts),
                local_rank=local_rank,
                local_size=sizes[host],
                cross_rank=peers[local_rank][host],
                cross_size=len(peers[local_rank]),
            )
        )
    return found

"""Where each rank of a job stands among those of its host, and its host among the others, in Horovod's terms."""

from collections import Counter
from collections.abc import Hashable, Sequence

from rankless.records.elastic_messages import RankAssignment


def assign_ranks(hosts: Sequence[Hashable]) -> list[RankAssignment]:
    """The seat of every rank. `hosts` has each rank's host, in the order of ranks."""
    sizes = Counter(hosts)
    # By local rank, the hosts that have a rank of that number, each with its place among them.
    peers = [
        {host: place for place, host in enumerate(host for host in sizes if sizes[host] > local_rank)}
        for local_rank in range(max(sizes.values()))
    ]
    seated: Counter[Hashable] = Counter()
    found = []
    for rank, host in enumerate(hosts):
        local_rank = seated[host]
        seated[host] += 1
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

"""The ranks of other hosts, as the watchdog of host 0 knows them from those hosts' reports."""

from collections.abc import Collection

from rankless.launch.peers import Peers
from rankless.records.events import ProcessObserved, RankStatus

RESPONSE_TIMEOUT_SECONDS = 2.5
"""For another host's response: it requests the stacks of its own workers first."""


class RemoteRanks:
    """The latest status of each rank on another host.

    Args:
        peers: The other hosts.
        ranks: The ranks there.
        processes: The processes on hosts without workers, which respond too.
    """

    def __init__(self, peers: Peers, ranks: Collection[int], *, processes: Collection[tuple[str, int]] = ()) -> None:
        self._peers = peers
        self._ranks, self._processes = frozenset(ranks), frozenset(processes)
        self._pending: frozenset[int] = frozenset()
        self._pending_processes: frozenset[tuple[str, int]] = frozenset()
        self._requested_at = 0.0
        self.statuses: dict[int, RankStatus] = {}

    def receive(self, where: RankStatus) -> None:
        """Store a status that a host sent, on request or on its own."""
        self.statuses[where.rank] = where
        self._pending -= {where.rank}

    def receive_process(self, observed: ProcessObserved) -> None:
        """Note that the host of a process has responded."""
        self._pending_processes -= {(observed.role, observed.number)}

    def request_statuses(self, now: float) -> None:
        """Request the status of every remote rank, and of processes on hosts without ranks."""
        if self._ranks or self._processes:
            self._peers.request_rank_status()
            self._pending, self._pending_processes, self._requested_at = self._ranks, self._processes, now

    def is_complete(self, now: float, *, ended: Collection[int]) -> bool:
        """Return True once all but the ranks in `ended` have responded, or the responses have timed out."""
        return (
            self._pending <= set(ended) and not self._pending_processes
        ) or now - self._requested_at > RESPONSE_TIMEOUT_SECONDS

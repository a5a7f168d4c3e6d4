"""The ranks of other hosts, as the watchdog of host 0 knows them from those hosts' reports."""

from collections.abc import Collection

from rankless.launch.rendezvous.peers import Peers
from rankless.records.events import RankStatus

RESPONSE_TIMEOUT_SECONDS = 2.5
"""For another host's response: it requests the stacks of its own workers first."""


class RemoteRanks:
    """The latest status of each rank on another host."""

    def __init__(self, peers: Peers, ranks: Collection[int]) -> None:
        self._peers = peers
        self._ranks = frozenset(ranks)
        self._pending: frozenset[int] = frozenset()
        self._requested_at = 0.0
        self.statuses: dict[int, RankStatus] = {}

    def receive(self, where: RankStatus) -> None:
        """Store a status that a host sent, on request or on its own."""
        self.statuses[where.rank] = where
        self._pending -= {where.rank}

    def request_statuses(self, now: float) -> None:
        """Request the status of every remote rank."""
        if self._ranks:
            self._peers.request_rank_status()
            self._pending, self._requested_at = self._ranks, now

    def is_complete(self, now: float, *, ended: Collection[int]) -> bool:
        """Return True once every rank outside `ended` has responded, or the responses have timed out."""
        return self._pending <= set(ended) or now - self._requested_at > RESPONSE_TIMEOUT_SECONDS

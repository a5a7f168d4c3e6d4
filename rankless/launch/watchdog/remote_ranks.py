"""The ranks of other hosts as the hang watch of host 0 knows them: by what those hosts tell, by themselves or asked."""

from collections.abc import Collection

from rankless.launch.rendezvous.peers import Others
from rankless.records.events import RankStatus

RESPONSE_TIMEOUT_SECONDS = 2.5
"""For another host's answer: it asks its own workers first."""


class RemoteRanks:
    """What was told last of each rank."""

    def __init__(self, others: Others, ranks: Collection[int]) -> None:
        self._others = others
        self._ranks = frozenset(ranks)
        self._pending: frozenset[int] = frozenset()
        self._requested_at = 0.0
        self.statuses: dict[int, RankStatus] = {}

    def receive(self, where: RankStatus) -> None:
        """Note what a host tells."""
        self.statuses[where.rank] = where
        self._pending -= {where.rank}

    def request_statuses(self, now: float) -> None:
        """Ask for all of them."""
        if self._ranks:
            self._others.ask_where()
            self._pending, self._requested_at = self._ranks, now

    def is_complete(self, now: float, *, ended: Collection[int]) -> bool:
        """Whether nothing more is to be expected; those in `ended` tell nothing."""
        return self._pending <= set(ended) or now - self._requested_at > RESPONSE_TIMEOUT_SECONDS

"""The ranks of other hosts as the hang watch of host 0 knows them: by what those hosts tell, by themselves or asked."""

from collections.abc import Collection

from rankless.launch.rendezvous.peers import Others
from rankless.records.events import RankStatus

PATIENCE_SECONDS = 2.5
"""For another host's answer: it asks its own workers first."""


class Elsewhere:
    """What was told last of each rank."""

    def __init__(self, others: Others, ranks: Collection[int]) -> None:
        self._others = others
        self._ranks = frozenset(ranks)
        self._missing: frozenset[int] = frozenset()
        self._asked_at = 0.0
        self.told: dict[int, RankStatus] = {}

    def take(self, where: RankStatus) -> None:
        """Note what a host tells."""
        self.told[where.rank] = where
        self._missing -= {where.rank}

    def ask(self, now: float) -> None:
        """Ask for all of them."""
        if self._ranks:
            self._others.ask_where()
            self._missing, self._asked_at = self._ranks, now

    def is_answered(self, now: float, *, ended: Collection[int]) -> bool:
        """Whether nothing more is to be expected; those in `ended` tell nothing."""
        return self._missing <= set(ended) or now - self._asked_at > PATIENCE_SECONDS

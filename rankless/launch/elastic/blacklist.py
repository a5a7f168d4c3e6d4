"""Hosts that get no new workers for now, because workers fail there again and again."""

from dataclasses import dataclass

FAILURES = 3
"""So many, and the host is listed."""
LOST_SECONDS = 10.0
"""After it was lost for the first time, or could not be reached: it may be about to start. Then twice that."""


@dataclass
class _Standing:
    early: int = 0
    own: int = 0
    times_listed: int = 0
    until: float = 0.0


class Blacklist:
    """How each host stands. `cooldown` are the seconds of the first listing, doubled by each further one, and the most
    it may become; without it a listing is for ever.
    """

    def __init__(self, cooldown: tuple[float, float] | None) -> None:
        self._cooldown = cooldown
        self._standings: dict[str, _Standing] = {}

    def failed(self, host: str, now: float, *, is_own: bool) -> float | None:
        """A worker has failed there: by a fault of its own, or before it got anywhere. If that lists the host, for how
        many seconds.
        """
        standing = self._standings.setdefault(host, _Standing())
        if is_own:
            standing.own += 1
        else:
            standing.early += 1
        if max(standing.own, standing.early) < FAILURES:
            return None
        standing.own = standing.early = 0
        standing.times_listed += 1
        seconds = float("inf")
        if self._cooldown is not None:
            least, most = self._cooldown
            seconds = min(most, least * 2 ** (standing.times_listed - 1))
        standing.until = now + seconds
        return seconds

    def lost(self, host: str, now: float) -> float | None:
        """The host went, or was not there: it is left alone for a while. If that lists it, for how many seconds."""
        seconds = self.failed(host, now, is_own=False)
        if seconds is None:
            standing = self._standings[host]
            standing.until = now + LOST_SECONDS * standing.early
        return seconds

    def succeeded(self, host: str) -> None:
        """A worker there takes part: those that were killed before it, before they did, do not count."""
        if host in self._standings:
            self._standings[host].early = 0

    def has(self, host: str, now: float) -> bool:
        """Whether a host is listed now."""
        return host in self._standings and now < self._standings[host].until

    def may_release(self, host: str) -> bool:
        """Whether a host that is listed will be free again."""
        return self._standings[host].until != float("inf")

"""The hosts that get no new workers for a while, because workers fail there repeatedly."""

from dataclasses import dataclass

MAX_FAILURES = 3
"""After so many failures a host is blacklisted."""
LOST_HOST_SECONDS = 10.0
"""How long a host gets no workers after its first loss: it may be about to boot. The time grows with each loss."""


@dataclass
class _HostRecord:
    early_failures: int = 0
    own_failures: int = 0
    times_listed: int = 0
    listed_until: float = 0.0


class Blacklist:
    """Counts the failures of each host.

    `cooldown` is the duration of a host's first listing in seconds, and the longest duration. Each further listing
    doubles it. Without a cooldown a listing is permanent.
    """

    def __init__(self, cooldown: tuple[float, float] | None) -> None:
        self._cooldown = cooldown
        self._hosts: dict[str, _HostRecord] = {}

    def count_failure(self, host: str, now: float, *, is_own: bool) -> float | None:
        """Count a worker that failed on this host, by a fault of its own or before it took part in a round.

        Returns for how many seconds this blacklists the host, or None.
        """
        record = self._hosts.setdefault(host, _HostRecord())
        if is_own:
            record.own_failures += 1
        else:
            record.early_failures += 1
        if max(record.own_failures, record.early_failures) < MAX_FAILURES:
            return None
        record.own_failures = record.early_failures = 0
        record.times_listed += 1
        seconds = float("inf")
        if self._cooldown is not None:
            minimum, maximum = self._cooldown
            seconds = min(maximum, minimum * 2 ** (record.times_listed - 1))
        record.listed_until = now + seconds
        return seconds

    def count_loss(self, host: str, now: float) -> float | None:
        """Count the loss of a host, or a failed attempt to reach it. It gets no workers for a while.

        Returns for how many seconds this blacklists the host, or None.
        """
        seconds = self.count_failure(host, now, is_own=False)
        if seconds is None:
            record = self._hosts[host]
            record.listed_until = now + LOST_HOST_SECONDS * record.early_failures
        return seconds

    def clear_early_failures(self, host: str) -> None:
        """Forget the workers that failed early on this host, because a worker there takes part in a round."""
        if host in self._hosts:
            self._hosts[host].early_failures = 0

    def has(self, host: str, now: float) -> bool:
        """Whether a host gets no workers now."""
        return host in self._hosts and now < self._hosts[host].listed_until

    def may_release(self, host: str) -> bool:
        """Whether a listed host will get workers again."""
        return self._hosts[host].listed_until != float("inf")

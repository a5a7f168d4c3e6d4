"""What it means when ranks stand still: who waits for whom, and how sure that is.

Note [ending a job]: a healthy job must never be ended, and one that is not must not hold its machines for days. Without
a word from the user a job is ended only if nothing in it runs: no rank computes, none is at a breakpoint, some wait for
others, and the others have stood still, with all their processes, for `BLOCKED_SECONDS`; it is `DEADLOCK_SECONDS` if
every rank waits for another one, or has ended. With a timeout of the user's it is ended also if the rank that does not
come computes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rankless.records.events import RankStatus

DEADLOCK_SECONDS = 60.0
DEADLOCK_MULTIPLE = 3.0
BLOCKED_SECONDS = 600.0
BLOCKED_MULTIPLE = 10.0


@dataclass(frozen=True, kw_only=True)
class HangDiagnosis:
    """Why the job does not go on, as far as can be told."""

    waiting: tuple[RankStatus, ...]
    """Of these `culprits` are no part."""
    missing: tuple[RankStatus, ...]
    """The ranks that do not come; empty if all wait in one place."""
    seconds: float
    """For how long it has stood still."""

    def abort_after(self, *, timeout: float | None, stall_limit: float) -> float:
        """After how many seconds the job is to be ended; endless if never. `limit`: what is unusual for this job."""
        if timeout == 0 or any(missing_rank.state == "debugged" for missing_rank in self.missing):
            return float("inf")
        if timeout is not None:
            return timeout
        statuses = (*self.waiting, *self.missing)
        if not self.waiting or not self.missing or any(where.state == "computes" for where in statuses):
            return float("inf")
        if any(where.state == "waits" and where.still_seconds < stall_limit for where in statuses):
            return float("inf")  # data may be on its way
        if all(where.state in ("waits", "ended") for where in self.missing):
            return max(DEADLOCK_SECONDS, DEADLOCK_MULTIPLE * stall_limit)
        # Who is stopped was stopped by somebody, who may want to look, and then let it go on.
        return max(BLOCKED_SECONDS, BLOCKED_MULTIPLE * stall_limit)


def diagnose(
    ranks: Mapping[int, RankStatus], *, seconds: float, steps: int, stall_limit: float
) -> HangDiagnosis | None:
    """What holds the job up; None if nothing seems to. `ranks` has every rank of the job; `limit` as above."""
    waiting = [where for where in ranks.values() if where.state == "waits"]
    others = [where for where in ranks.values() if where.state not in ("waits", "moves")]
    if not waiting:
        # A server that waits for requests stands still, too: only who has trained is expected to go on.
        living = [where for where in others if where.state != "ended"]
        if not living or not steps or not all(where.state in ("blocked", "stopped") for where in living):
            return None
        return HangDiagnosis(waiting=(), missing=tuple(living), seconds=seconds)
    if others:
        ended = [where for where in others if where.state == "ended"]
        # Who has ended is to blame only if nobody else is: ranks may end before others.
        missing = [where for where in others if where.state != "ended"] or ended
        return HangDiagnosis(waiting=tuple(waiting), missing=tuple(missing), seconds=seconds)
    if min(where.still_seconds for where in waiting) < min(seconds, stall_limit) / 2:
        return None  # somebody has only just come
    minority = _find_minority(waiting)
    return HangDiagnosis(
        waiting=tuple(where for where in waiting if where not in minority), missing=tuple(minority), seconds=seconds
    )


def _find_minority(waiting: Sequence[RankStatus]) -> list[RankStatus]:
    """Those that wait elsewhere than most; if no place has most, elsewhere than the lowest rank. Empty if all wait in
    one place.
    """
    locations: dict[tuple[str, str], list[RankStatus]] = {}
    for where in sorted(waiting, key=lambda where: where.rank):
        locations.setdefault((where.doing, where.line), []).append(where)
    most = max(locations.values(), key=len)
    return [where for where in waiting if where not in most]

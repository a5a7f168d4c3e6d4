"""Decide which ranks hold up a hung job, and after how long to end the job.

Note [ending a job]: the watchdog must never end a healthy job, and must not let a hung job hold its machines for days.
Without a timeout from the user, it ends a job only if nothing in it runs. No rank computes, no rank is at a breakpoint,
and some ranks wait for others. The other ranks and their child processes must have been idle for `BLOCKED_SECONDS`.
`DEADLOCK_SECONDS` suffice if every rank waits for another or has ended. With a timeout from the user, the watchdog also
ends a job whose missing rank computes.

If no rank waits for another one, the ranks may wait for something outside the job, such as requests, a download or a
person. The watchdog reports that in every phase, and ends the job only with a timeout from the user.

Note [timed-out collectives]: when a collective raises the timeout of the script's own process group, PyTorch raises in
the ranks that waited and does not name the missing rank. The watchdog collects the status of all ranks at once. A rank
that waits elsewhere, or does not wait at all, is missing.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rankless.config.extensions import list_extensions
from rankless.launch.watchdog.phase_timeouts import BY_NAME as PHASES
from rankless.launch.watchdog.process_activity import WAITS_FOR_DISK
from rankless.launch.watchdog.processes_beside_workers import ProcessStatus
from rankless.launch.watchdog.stack_classifier import classify_stack
from rankless.launch.watchdog.stacks import parse_traceback
from rankless.records.events import Raised, RankStatus

DEADLOCK_SECONDS = 60.0
DEADLOCK_MULTIPLE = 3.0
BLOCKED_SECONDS = 600.0
BLOCKED_MULTIPLE = 10.0
_TIMED_OUT = re.compile(
    r"(?:Timed out waiting|[Ww]ait timeout after) (?P<milliseconds>\d+) ?ms"
    r"|(?:rank \d+|a rank) did not take part within (?P<seconds>[\d.e+]+) s"
)
"""The messages of Gloo, of the TCP store, and of groups whose ranks reduce in shared memory."""
_TRACEBACK_HEADER = "Traceback (most recent call last):"


@dataclass(frozen=True, kw_only=True)
class HangDiagnosis:
    """Which ranks wait, and which ranks they wait for."""

    waiting: tuple[RankStatus, ...]
    """The ranks that wait in a collective, without those in `missing`."""
    missing: tuple[RankStatus, ...]
    """The ranks that did not arrive, or cannot connect to others; empty if all ranks wait in the same place."""
    seconds: float
    """How long the job has made no progress."""
    silent: tuple[ProcessStatus, ...] = ()
    """The processes beside the workers that do not answer. If there is one, all ranks that are idle wait for it."""
    busy: tuple[ProcessStatus, ...] = ()
    """The processes beside the workers that compute."""

    @property
    def asked_roles(self) -> tuple[str, ...]:
        """What the processes are called for whose answer ranks wait, if no rank and no process holds up the job."""
        if self.missing or self.silent:
            return ()
        asks = {label: each.role.process for each in list_extensions() if each.role for label in each.stacks.asks}
        return tuple(dict.fromkeys(asks[where.doing] for where in self.waiting if where.doing in asks))

    @property
    def least_seconds(self) -> float:
        """The shortest pause that is reported in the phases of the ranks that hold up the job."""
        return max(PHASES[where.phase].least_seconds for where in (self.missing or self.waiting))

    def abort_after(self, *, timeout: float | None, stall_limit: float) -> float:
        """Return after how many seconds without progress to end the job; infinity for never.

        Args:
            timeout: The user's `--hang-timeout` in seconds; None if the user gave none, 0 to never end the job.
            stall_limit: The pause in seconds that is unusual for this job.
        """
        states = [missing_rank.state for missing_rank in self.missing] + [process.state for process in self.silent]
        if timeout == 0 or "debugged" in states or (self.asked_roles and self.busy):
            return float("inf")
        if timeout is not None:
            return timeout
        statuses = (*self.waiting, *self.missing)
        has_unanswered = any(where.connecting_to for where in self.missing)
        if (
            not (self.missing or self.silent)
            or not (self.waiting or has_unanswered)
            or any(where.state == "computes" for where in statuses)
        ):
            return float("inf")
        if any(where.state == "waits" and where.idle_seconds < stall_limit for where in statuses):
            return float("inf")  # data may still be in transit
        if not self.silent and all(where.state in ("waits", "ended") for where in self.missing):
            return max(DEADLOCK_SECONDS, DEADLOCK_MULTIPLE * stall_limit)
        # Somebody stopped a stopped process, perhaps to inspect it and then resume it.
        return max(BLOCKED_SECONDS, BLOCKED_MULTIPLE * stall_limit)


def blame_processes(
    ranks: Mapping[int, RankStatus], processes: Sequence[ProcessStatus], *, seconds: float
) -> HangDiagnosis | None:
    """Return the diagnosis if a process beside the workers does not answer and a rank is idle; None otherwise.

    Args:
        ranks: The status of every rank of the job.
        processes: The status of every process beside the workers.
        seconds: How long the job has made no progress.
    """
    silent = tuple(each for each in processes if each.holds_up)
    idle = [where for where in ranks.values() if where.state in ("waits", "blocked")]
    if not silent or not idle:
        return None
    others = [where for where in ranks.values() if where.state in ("computes", "stopped", "debugged")]
    return HangDiagnosis(waiting=tuple(idle), missing=tuple(others), seconds=seconds, silent=silent)


def diagnose(ranks: Mapping[int, RankStatus], *, seconds: float, stall_limit: float) -> HangDiagnosis | None:
    """Find the ranks that hold up the job; None if none seems to.

    Args:
        ranks: The status of every rank of the job.
        seconds: How long the job has made no progress.
        stall_limit: The pause in seconds that is unusual for this job.
    """
    waiting = [where for where in ranks.values() if where.state == "waits"]
    others = [where for where in ranks.values() if where.state not in ("waits", "moves")]
    if not waiting:
        return _diagnose_idle(others)
    if others:
        ended = [where for where in others if where.state == "ended"]
        # Some ranks may end earlier than others: a rank that has ended is missing only if no other rank is.
        missing = [where for where in others if where.state != "ended"] or ended
        return HangDiagnosis(waiting=tuple(waiting), missing=tuple(missing), seconds=seconds)
    # On a busy machine the last rank may arrive long after the others: only since then do all wait for each other.
    shortest = min(where.idle_seconds for where in waiting)
    if shortest < min(seconds, stall_limit) / 2:
        return None  # a rank arrived only a moment ago
    minority = [where for where in waiting if where.connecting_to] or _find_minority(waiting)
    return HangDiagnosis(
        waiting=tuple(where for where in waiting if where not in minority),
        missing=tuple(minority),
        seconds=min(seconds, shortest),
    )


def _diagnose_idle(others: Sequence[RankStatus]) -> HangDiagnosis | None:
    """Return the diagnosis if no rank waits for another one, and nothing in the job runs; None if something does."""
    living = [where for where in others if where.state != "ended"]
    # The process of a rank whose script has ended may wait for a thread that never ends.
    idle = living or [where for where in others if where.phase == "teardown"]
    if not idle or any(where.state == "debugged" for where in idle):
        return None
    if any(where.state == "computes" and where.doing != WAITS_FOR_DISK for where in idle):
        return None
    return HangDiagnosis(waiting=(), missing=tuple(idle), seconds=min(where.idle_seconds for where in idle))


def _find_minority(waiting: Sequence[RankStatus]) -> list[RankStatus]:
    """Return the ranks that wait elsewhere than most ranks; empty if all wait in one place.

    On a tie the lowest rank's place counts as the majority.
    """
    locations: dict[tuple[str, str], list[RankStatus]] = {}
    for where in sorted(waiting, key=lambda where: where.rank):
        locations.setdefault((where.doing, where.line), []).append(where)
    most = max(locations.values(), key=len)
    return [where for where in waiting if where not in most]


def parse_timeout(record: Raised) -> RankStatus | None:
    """Return the status of a rank that a collective's timeout ended; None if the exception has another cause."""
    found = _TIMED_OUT.search(record.traceback)
    if found is None:
        return None
    _, _, trace = record.traceback[: found.start()].rpartition(_TRACEBACK_HEADER)
    frames = parse_traceback(trace)
    location = classify_stack(frames[::-1]) if frames else None
    if location is None or not location.collective:
        return None
    return RankStatus(
        rank=record.rank,
        time_ns=record.time_ns,
        state="waits",
        idle_seconds=int(found["milliseconds"]) / 1000 if found["milliseconds"] else float(found["seconds"]),
        doing=location.collective,
        line=location.line,
        text=location.text,
        stack=location.stack,
    )


def diagnose_timeout(ranks: Mapping[int, RankStatus], timed_out: Mapping[int, RankStatus]) -> HangDiagnosis | None:
    """Name the ranks that did not arrive where the ranks in `timed_out` waited; None if no rank seems to be missing."""
    first = next(iter(timed_out.values()))
    statuses = {**ranks, **timed_out}
    others = [where for where in statuses.values() if where.state not in ("waits", "moves")]
    living = [where for where in others if where.state != "ended"]
    location = (first.doing, first.line)
    minority = [
        where for where in statuses.values() if where.state == "waits" and (where.doing, where.line) != location
    ]
    missing = living or [where for where in minority if where.rank not in timed_out] or others
    if not missing:
        return None
    waiting = [where for where in statuses.values() if where.state == "waits" and where not in missing]
    return HangDiagnosis(waiting=tuple(waiting), missing=tuple(missing), seconds=first.idle_seconds)

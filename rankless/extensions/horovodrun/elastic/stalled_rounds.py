"""Detects a round without progress: finds the member for which the others wait, and decides whether to kill it.

The members are on several hosts. The agents of these hosts report the status of each member that makes no progress. The
round makes progress as long as one member does. `launch.watchdog.missing_ranks` finds the missing member, as in any
other job. Here the driver kills only that member, and a replacement continues from the last commit.

After some members have reached the end of the script, the others may take their time, but they are reported. There is
no next round for them, so the job fails if one is killed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from rankless.launch.watchdog.missing_ranks import HangDiagnosis, diagnose
from rankless.launch.watchdog.report import describe_status, describe_waiting
from rankless.launch.watchdog.step_rate import STARTUP_STALL_SECONDS
from rankless.records.elastic_messages import RankAssignment
from rankless.records.events import RankStatus
from rankless.records.quantities import format_ranks, format_seconds


@dataclass(frozen=True)
class StallReport:
    """The report on a round without progress."""

    text: str
    workers_to_kill: Mapping[int, str]
    """The reason for each worker to kill, by worker number."""


class StalledRoundDetector:
    """Collects the statuses of workers that make no progress.

    Without a timeout from the user, it kills a worker only if nothing in the round runs, and only after many minutes.
    """

    def __init__(self, timeout_seconds: float | None) -> None:
        self._timeout_seconds = timeout_seconds
        self._statuses: dict[int, tuple[RankStatus, float]] = {}
        self._round, self._round_start = 0, 0.0
        self._reported_seconds = 0.0

    def receive(self, status: RankStatus, now: float) -> None:
        """Process the status of a worker."""
        if status.state == "moves":
            self._statuses.pop(status.rank, None)
        else:
            self._statuses[status.rank] = status, now

    def forget(self, number: int) -> None:
        """Forget a worker that has failed."""
        self._statuses.pop(number, None)

    def mark_finished(self, number: int, now: float) -> None:
        """Note that a worker has ended with exit code 0."""
        self._statuses[number] = RankStatus(rank=number, time_ns=0, state="ended"), now

    def tick(
        self, round: int, assignments: Mapping[int, RankAssignment], hosts: Mapping[int, str], now: float
    ) -> StallReport | None:
        """Return a report if one is due: first after STARTUP_STALL_SECONDS, then each time the stall has doubled."""
        if round != self._round:
            self._round, self._round_start, self._reported_seconds = round, now, 0.0
        statuses = self._collect_statuses(assignments, now)
        if len(statuses) < len(assignments):
            self._reported_seconds = 0.0
            return None
        live = [status for status in statuses.values() if status.state != "ended"]
        if not live:
            return None
        stalled = min(status.idle_seconds for status in live)
        diagnosis = self._diagnose(statuses, stalled)
        if diagnosis is None:
            return None
        self._reported_seconds = stalled
        names = {each.rank: (number, hosts[number]) for number, each in assignments.items()}
        ended = sorted(status.rank for status in statuses.values() if status.state == "ended")
        return StallReport(
            _format_report(round, diagnosis, names, ended),
            self._choose_workers_to_kill(diagnosis, names, live, stalled, has_ended=bool(ended)),
        )

    def _diagnose(self, statuses: Mapping[int, RankStatus], stalled: float) -> HangDiagnosis | None:
        timeout = self._timeout_seconds
        minimum = STARTUP_STALL_SECONDS if timeout is None else min(STARTUP_STALL_SECONDS, timeout)
        has_reached_timeout = self._reported_seconds < (timeout or 0.0) <= stalled
        if stalled < max(minimum, 2 * self._reported_seconds) and not has_reached_timeout:
            return None
        return diagnose(statuses, seconds=stalled, stall_limit=minimum)

    def _choose_workers_to_kill(
        self,
        diagnosis: HangDiagnosis,
        names: Mapping[int, tuple[int, str]],
        live: Sequence[RankStatus],
        stalled: float,
        *,
        has_ended: bool,
    ) -> dict[int, str]:
        if stalled < diagnosis.abort_after(timeout=self._timeout_seconds, stall_limit=STARTUP_STALL_SECONDS):
            return {}
        if has_ended:
            reason = f"did not finish for {format_seconds(stalled)}, and others have"
            return {names[status.rank][0]: reason for status in live}
        if not diagnosis.waiting:  # killing all members would lose the state
            return {}
        reason = f"did not arrive while {describe_waiting(diagnosis)} for {format_seconds(stalled)}"
        return {names[status.rank][0]: reason for status in diagnosis.missing}

    def _collect_statuses(self, assignments: Mapping[int, RankAssignment], now: float) -> dict[int, RankStatus]:
        """Return the statuses of the members without progress, by rank.

        A status from before the round describes the wait for the round, so it does not count.
        """
        statuses = {}
        for number, assignment in assignments.items():
            status, received_at = self._statuses.get(number, (None, 0.0))
            if status is not None and received_at >= self._round_start:
                still = min(status.idle_seconds + now - received_at, now - self._round_start)
                statuses[assignment.rank] = msgspec.structs.replace(status, rank=assignment.rank, idle_seconds=still)
        return statuses


def _format_report(
    round: int, diagnosis: HangDiagnosis, names: Mapping[int, tuple[int, str]], ended: Sequence[int]
) -> str:
    waiting = [describe_waiting(diagnosis)] if diagnosis.waiting or not ended else []
    how = "; ".join([*waiting, *([f"{format_ranks(ended)} ended"] if ended else [])])
    lines = [f"round {round} has made no progress for {format_seconds(diagnosis.seconds)}: {how}"]
    for status in diagnosis.missing:
        if status.state != "ended":
            number, host = names[status.rank]
            lines.append(f"  rank {status.rank}, worker {number} on {host}: {describe_status(status)}")
    return "\n".join(lines)

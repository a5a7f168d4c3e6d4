"""A round that stands still: which of its members the others wait for, and whether that one is to be ended.

Its members are on several hosts, whose crews tell where each worker is that stands still. As long as one of them moves,
the round does. Which of them is to blame, and after how long, is judged as in any other job
(`launch.watchdog.diagnosis`); here
only that one is ended, and a replacement goes on from the last commit. Once some have come to the end of the script,
who has not may take its time, but is spoken of; there is no next round for it, so if it is ended, the job has failed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from rankless.launch.watchdog.diagnosis import HangDiagnosis, diagnose
from rankless.launch.watchdog.report import describe_status, describe_waiting, format_ranks
from rankless.launch.watchdog.step_rate import STARTUP_STALL_SECONDS
from rankless.records.elastic_messages import RankAssignment
from rankless.records.events import RankStatus
from rankless.records.quantities import format_seconds


@dataclass(frozen=True)
class Report:
    """What is to be said of a round that stands still."""

    text: str
    culprits: Mapping[int, str]
    """The workers that are to be ended, by their numbers, and why."""


class RoundWatchdog:
    """Told where workers are that stand still. Without a timeout of the user's only a round in which nothing at all
    runs loses a worker, and after many minutes.
    """

    def __init__(self, timeout_seconds: float | None) -> None:
        self._timeout_seconds = timeout_seconds
        self._told: dict[int, tuple[RankStatus, float]] = {}
        self._round, self._began = 0, 0.0
        self._spoken_of = 0.0

    def take(self, where: RankStatus, now: float) -> None:
        """What is told of a worker."""
        if where.state == "moves":
            self._told.pop(where.rank, None)
        else:
            self._told[where.rank] = where, now

    def forget(self, number: int) -> None:
        """A worker has ended."""
        self._told.pop(number, None)

    def finished(self, number: int, now: float) -> None:
        """A worker has come to the end of its script."""
        self._told[number] = RankStatus(rank=number, time_ns=0, state="ended"), now

    def turn(
        self, round: int, assignments: Mapping[int, RankAssignment], hosts: Mapping[int, str], now: float
    ) -> Report | None:
        """Return a report if one is due: first after STARTUP_STALL_SECONDS, then each time the stall has doubled."""
        if round != self._round:
            self._round, self._began, self._spoken_of = round, now, 0.0
        members = self._members(assignments, now)
        if len(members) < len(assignments):
            self._spoken_of = 0.0
            return None
        ended = sorted(where.rank for where in members.values() if where.state == "ended")
        living = [where for where in members.values() if where.state != "ended"]
        if not living:
            return None
        still = min(where.still_seconds for where in living)
        timeout = self._timeout_seconds
        least = STARTUP_STALL_SECONDS if timeout is None else min(STARTUP_STALL_SECONDS, timeout)
        is_due = still >= max(least, 2 * self._spoken_of) or self._spoken_of < (timeout or 0.0) <= still
        diagnosis = diagnose(members, seconds=still, steps=1, stall_limit=least) if is_due else None
        if diagnosis is None:
            return None
        self._spoken_of = still
        names = {assignment.rank: (number, hosts[number]) for number, assignment in assignments.items()}
        ends = still >= diagnosis.abort_after(timeout=timeout, stall_limit=STARTUP_STALL_SECONDS)
        culprits = {}
        if ends and ended:
            why = f"did not come to its end for {format_seconds(still)}, and others have"
            culprits = {names[where.rank][0]: why for where in living}
        elif ends and diagnosis.waiting:  # were all to blame, nobody would be left who has the state
            why = f"did not come while {describe_waiting(diagnosis)} for {format_seconds(still)}"
            culprits = {names[where.rank][0]: why for where in diagnosis.missing}
        return Report(_text(round, diagnosis, names, ended), culprits)

    def _members(self, assignments: Mapping[int, RankAssignment], now: float) -> dict[int, RankStatus]:
        """Those of the round that stand still, by rank; what was told before it began was of the wait for it."""
        found = {}
        for number, assignment in assignments.items():
            where, told = self._told.get(number, (None, 0.0))
            if where is not None and told >= self._began:
                still = min(where.still_seconds + now - told, now - self._began)
                found[assignment.rank] = msgspec.structs.replace(where, rank=assignment.rank, still_seconds=still)
        return found


def _text(round: int, diagnosis: HangDiagnosis, names: Mapping[int, tuple[int, str]], ended: Sequence[int]) -> str:
    waiting = [describe_waiting(diagnosis)] if diagnosis.waiting or not ended else []
    how = "; ".join([*waiting, *([f"{format_ranks(ended)} ended"] if ended else [])])
    lines = [f"round {round} has stood still for {format_seconds(diagnosis.seconds)}: {how}"]
    for where in diagnosis.missing:
        if where.state != "ended":
            number, host = names[where.rank]
            lines.append(f"  rank {where.rank}, worker {number} on {host}: {describe_status(where)}")
    return "\n".join(lines)

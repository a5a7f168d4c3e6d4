"""How long a job's steps take, and how long a pause must be to count as a stall."""

from collections import deque
from collections.abc import Sequence

from rankless.records.worker_status import WorkerStatus

MIN_STALL_SECONDS = 10.0
"""The shortest pause between two steps that the watchdog reports."""
STARTUP_STALL_SECONDS = 30.0
"""The same before the first step: one rank may download or prepare data while the others wait."""
STEP_MULTIPLE = 20.0
"""A pause of so many median steps counts as a stall."""
PAUSE_MULTIPLE = 2.0
"""Pauses that ended on their own, such as an evaluation, are normal: a stall is so many times longer."""
HISTORY_LENGTH = 64


class StepRate:
    """Learns the usual step time from the steps that the workers count."""

    def __init__(self) -> None:
        self._per_step: deque[float] = deque(maxlen=HISTORY_LENGTH)
        self._pauses: deque[float] = deque(maxlen=HISTORY_LENGTH)
        self._count = 0
        self._last: float | None = None

    def update(self, pages: Sequence[WorkerStatus]) -> None:
        """Read the workers' counters. A step of any worker is progress."""
        latest = max((page for page in pages if page.last is not None), key=lambda page: page.last or 0.0, default=None)
        if latest is None or latest.last is None or (self._last is not None and latest.last <= self._last):
            return
        count = max(page.count for page in pages)
        if self._last is not None:
            seconds = latest.last - self._last
            self._per_step.append(seconds / max(1, count - self._count))
            self._pauses.append(seconds)
        self._count, self._last = count, latest.last

    def record_pause(self, seconds: float) -> None:
        """Record that the job paused for `seconds` and then continued on its own."""
        self._pauses.append(seconds)

    @property
    def steps(self) -> int:
        """Steps of the rank that has made the most."""
        return self._count

    @property
    def step_seconds(self) -> float | None:
        """The median time of a step; None before the second step."""
        # Not `statistics.median`: a user's module named `statistics` would shadow Python's.
        return sorted(self._per_step)[len(self._per_step) // 2] if self._per_step else None

    def seconds_since_step(self, now: float) -> float:
        """Seconds since the last step; infinity before the first."""
        return float("inf") if self._last is None else now - self._last

    @property
    def stall_limit(self) -> float:
        """The pause in seconds from which the job counts as stalled."""
        minimum = MIN_STALL_SECONDS if self._last is not None else STARTUP_STALL_SECONDS
        return max(minimum, STEP_MULTIPLE * (self.step_seconds or 0.0), PAUSE_MULTIPLE * max(self._pauses, default=0.0))

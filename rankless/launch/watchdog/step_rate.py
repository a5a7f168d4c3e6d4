"""How long a job's steps take, and how long it may stand still before that is unusual."""

from collections import deque
from collections.abc import Sequence

from rankless.records.worker_status import Steps

MIN_STALL_SECONDS = 10.0
"""Shorter pauses are never spoken of."""
STARTUP_STALL_SECONDS = 30.0
"""Before the first step: ranks wait there for one that fetches or prepares data."""
STEP_MULTIPLE = 20.0
PAUSE_MULTIPLE = 2.0
"""Pauses that have ended by themselves, as an evaluation's, are usual: so much longer is not."""
HISTORY_LENGTH = 64


class StepRate:
    """Learns from the steps that workers count."""

    def __init__(self) -> None:
        self._per_step: deque[float] = deque(maxlen=HISTORY_LENGTH)
        self._pauses: deque[float] = deque(maxlen=HISTORY_LENGTH)
        self._count = 0
        self._last: float | None = None

    def update(self, pages: Sequence[Steps]) -> None:
        """Take what the workers have counted by now. Steps of any of them are progress."""
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
        """The job stood still for so long, and went on by itself."""
        self._pauses.append(seconds)

    @property
    def steps(self) -> int:
        """Of the rank that has made most."""
        return self._count

    @property
    def step_seconds(self) -> float | None:
        """What a step usually takes; None before there are two."""
        # Not by `statistics`: a user's module of that name would come before Python's.
        return sorted(self._per_step)[len(self._per_step) // 2] if self._per_step else None

    def seconds_since_step(self, now: float) -> float:
        """Since the last step; endless before the first."""
        return float("inf") if self._last is None else now - self._last

    @property
    def stall_limit(self) -> float:
        """After how many seconds of standing still that is unusual."""
        minimum = MIN_STALL_SECONDS if self._last is not None else STARTUP_STALL_SECONDS
        return max(minimum, STEP_MULTIPLE * (self.step_seconds or 0.0), PAUSE_MULTIPLE * max(self._pauses, default=0.0))

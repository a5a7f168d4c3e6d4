"""Ends a run after a given number of training steps."""

from collections.abc import Callable

from rankless.context.step_events import ObservedJob, StepParticipant
from rankless.errors import StepsDone


class StepLimit(StepParticipant):
    """Counts training steps. All ranks make the same steps, so all stop at the same call."""

    def __init__(self, steps: int, *, at_end: Callable[[], None]) -> None:
        self._remaining = steps
        self._at_end = at_end

    def end_step(self, _job: ObservedJob) -> None:
        """Count a step of a job."""
        self.count_step()

    def count_step(self) -> None:
        """Count a step. At the last one and after it, call `at_end` and raise `StepsDone`."""
        self._remaining -= 1
        if self._remaining <= 0:
            self._at_end()
            raise StepsDone(0)

"""The end of a run that was asked for so many training steps only."""

from collections.abc import Callable

from rankless.errors import StepsDone


class StepLimit:
    """Counts training steps; all ranks make the same ones, so all stop at the same call."""

    def __init__(self, steps: int, *, at_end: Callable[[], None]) -> None:
        self._left = steps
        self._at_end = at_end

    def count_step(self) -> None:
        """One more step is done. After the last: call `at_end` and raise `StepsDone`, now and at each further one."""
        self._left -= 1
        if self._left <= 0:
            self._at_end()
            raise StepsDone(0)

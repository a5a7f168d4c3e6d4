"""Learning rates as functions of the number of steps that were made, by OneFlow's formulas."""

import math
from collections.abc import Sequence
from typing import Any

from ..missing import refuse, refuse_given


class Scheduler:
    """A learning rate for each step. Steps count from 0."""

    def __init__(self, base_lr: float, **not_taken: Any) -> None:
        refuse_given(f"flow.optimizer.{type(self).__name__}", **not_taken)
        if isinstance(base_lr, bool) or not isinstance(base_lr, int | float) or not base_lr >= 0:
            raise refuse("the learning rate", f"{base_lr!r}", "pass a number, such as 0.1")
        self.base_lr = float(base_lr)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        raise NotImplementedError


class PiecewiseConstantScheduler(Scheduler):
    """`values[0]` up to and with step `boundaries[0]`, counted from 0, then `values[1]`, and so on.

    Args:
        boundaries: The last step of each value but the last one, in ascending order. Empty for one constant value.
        values: The learning rates, one more than boundaries.
        **not_taken: A warmup is refused.

    Raises:
        ConfigError: The numbers do not fit.
    """

    def __init__(self, boundaries: Sequence[int], values: Sequence[float], **not_taken: Any) -> None:
        if len(values) != len(boundaries) + 1 or sorted(boundaries) != list(boundaries):
            found = f"boundaries {list(boundaries)} and values {list(values)}"
            fix = "pass ascending boundaries, and one value more than boundaries"
            raise refuse("flow.optimizer.PiecewiseConstantScheduler", found, fix)
        super().__init__(values[0], **not_taken)
        self.boundaries, self.values = tuple(boundaries), tuple(map(float, values))

    def rate(self, step: int) -> float:
        """Return the value of the step."""
        return self.values[sum(step > boundary for boundary in self.boundaries)]


class CosineScheduler(Scheduler):
    """From `base_lr` along a half cosine to `base_lr * alpha` at `steps`."""

    def __init__(self, base_lr: float, steps: int, alpha: float = 0.0, **not_taken: Any) -> None:
        super().__init__(base_lr, **not_taken)
        self.steps, self.alpha = steps, alpha

    def rate(self, step: int) -> float:
        """Return the learning rate of the step."""
        cosine = 0.5 * (1 + math.cos(math.pi * min(step, self.steps) / self.steps))
        return self.base_lr * ((1 - self.alpha) * cosine + self.alpha)

"""Several calls gathered into one step: the gradient of one call on all their rows.

Note [weights of calls]: a mean over the rows of one call is a sum over a count of that call's own, S / C. The mean over
the rows of all calls is the sum of S over the sum of C, so its gradient is the sum of C times each call's gradient over
the sum of C. C is what the loss divides by: rows, valid targets, a sum of class weights (program/denominators.py finds
it). The gradient is kept as the mean so far, so no number grows with the group and `.grad` always means something.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rankless.errors import StepError

RATIO_TOLERANCE = 1e-6
"""How far two quotients of counts may be apart and still be one number: counts may be sums in float32."""


@dataclass(frozen=True)
class LossWeight:
    """What a call's loss was divided by: `total`, of which a group has the sum, then plus a constant, at least another.

    (`mask.sum().clamp(min=1)` has `least=1`: the group's is clamped too, after the sum.)
    """

    total: float
    offset: float = 0.0
    minimum: float | None = None

    @property
    def divisor(self) -> float:
        """The number that divides."""
        number = self.total + self.offset
        return number if self.minimum is None else max(number, self.minimum)

    def add_total(self, total: float) -> "LossWeight":
        """The count of this call and of others before it."""
        return LossWeight(self.total + total, self.offset, self.minimum)


class GradientAccumulator:
    """The calls gathered since the last step. Without counts a loss is a sum over rows, and gradients add up."""

    def __init__(self) -> None:
        self.calls = 0
        self._gradients: dict[int, Tensor] = {}
        self._earlier: LossWeight | None = None
        self._ratios: tuple[float, ...] = ()

    def add(self, parameters: Sequence[Tensor], weights: Sequence[LossWeight], *, job: str, line: str) -> None:
        """Take in the call whose gradients the parameters hold; after it, `.grad` is the gradient of the group."""
        old, new = self._weights(weights, job=job, line=line)
        for parameter in parameters:
            self._add(parameter, old, new)
        self.calls += 1

    def restore(self, parameters: Sequence[Tensor]) -> None:
        """Make `.grad` the gradient of the group again, without the call made since."""
        for parameter in parameters:
            parameter.grad = self._gradients.get(id(parameter))

    def _add(self, parameter: Tensor, old: float, new: float) -> None:
        gathered, gradient = self._gradients.get(id(parameter)), parameter.grad
        if gathered is None:
            if gradient is None:
                return
            # A program's gradients lie in memory that its next run writes to.
            gathered = self._gradients[id(parameter)] = gradient * new if new else torch.zeros_like(gradient)
        else:
            gathered = gathered.mul_(old) if old else gathered.zero_()
            if gradient is not None and new:
                gathered.add_(gradient, alpha=new)
        parameter.grad = gathered

    def _weights(self, weights: Sequence[LossWeight], *, job: str, line: str) -> tuple[float, float]:
        """By what to multiply the gradient so far, and that of the call."""
        if not weights:
            return 1.0, 1.0
        self._require_proportion(weights, job=job, line=line)
        count = weights[0]
        before = self._earlier
        self._earlier = together = count.add_total(0.0 if before is None else before.total)
        if not together.divisor:
            return 0.0, 1.0
        # Before the first call, and after calls without a valid target, there is nothing to keep.
        old = 0.0 if before is None or not before.total else before.divisor / together.divisor
        return old, count.divisor / together.divisor

    def _require_proportion(self, weights: Sequence[LossWeight], *, job: str, line: str) -> None:
        """Terms of one loss may have counts of their own only if they grow together."""
        ratios = tuple(weight.total / weights[0].total if weights[0].total else 1.0 for weight in weights)
        if not self._ratios:
            self._ratios = ratios
        pairs = zip(ratios, self._ratios, strict=True)
        if any(abs(now - before) > RATIO_TOLERANCE * abs(before) for now, before in pairs):
            raise StepError(
                expected=f"the terms of job {job!r}'s loss to be means over counts in one proportion in all calls of a "
                "step; else each term would need its own gradient",
                found=f"counts of {', '.join(f'{weight.total:,.10g}' for weight in weights)} in this call, in another "
                "proportion before",
                fix="give all calls of a step one length, divide all terms by the same count, or train without "
                "accumulate=",
                where=line,
            )

"""Gradient accumulation: several calls make one step with the gradient of one call on all their rows.

Note [weights of calls]: a mean over the rows of one call is S / C, with the call's own count C. The mean over the rows
of all calls is sum(S) / sum(C). Its gradient is therefore the sum of C times each call's gradient, divided by sum(C). C
is what the loss divides by: rows, valid targets, or a sum of class weights. `compiler.accumulation.loss_normalizers`
finds it. The accumulator keeps the running mean, so values do not grow with the number of calls and `.grad` is always a
gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rankless.errors import StepError

RATIO_TOLERANCE = 1e-6
"""Relative tolerance for equal ratios of weights, which may be sums in float32."""


@dataclass(frozen=True)
class LossWeight:
    """What a call's loss divides by.

    `total` is summed over the calls of a step. `offset` is added once, and `minimum` clamps the result from below.
    `mask.sum().clamp(min=1)` has `minimum=1`: for several calls the clamp applies after the sum.
    """

    total: float
    offset: float = 0.0
    minimum: float | None = None

    @property
    def divisor(self) -> float:
        """The number that the loss divides by."""
        number = self.total + self.offset
        return number if self.minimum is None else max(number, self.minimum)

    def add_total(self, total: float) -> "LossWeight":
        """Return the weight of this call together with earlier calls."""
        return LossWeight(self.total + total, self.offset, self.minimum)


class GradientAccumulator:
    """Accumulates the gradients of the calls since the last step.

    Without weights the loss is a sum over rows, and gradients add up.
    """

    def __init__(self, tables: Sequence[Any]) -> None:
        """Accumulate also the gradients of rows of tables."""
        self.calls = 0
        self._tables = tables
        self._rows: list[Any] = [None] * len(tables)
        """The gradients of each table's rows."""
        self._gradients: dict[int, Tensor] = {}
        self._versions: dict[int, int] = {}
        self._earlier: LossWeight | None = None
        self._ratios: tuple[float, ...] = ()

    def add(self, parameters: Sequence[Tensor], weights: Sequence[LossWeight], *, job: str, line: str) -> None:
        """Add the call whose gradients the parameters hold. Then `.grad` is the accumulated gradient."""
        self._require_unchanged(job=job, line=line)
        self._require_equal_kinds(parameters, weights, job=job, line=line)
        old, new = self._compute_factors(weights, job=job, line=line)
        for parameter in parameters:
            self._add(parameter, old, new)
        self._rows = [
            table.join_gradients(rows, (old, new)) for table, rows in zip(self._tables, self._rows, strict=True)
        ]
        self._versions = {key: gradient._version for key, gradient in self._gradients.items()}
        self.calls += 1

    def restore(self, parameters: Sequence[Tensor]) -> None:
        """Set `.grad` to the accumulated gradient, without the latest call."""
        for parameter in parameters:
            parameter.grad = self._gradients.get(id(parameter))
        restored = {id(parameter) for parameter in parameters}
        for table, rows in zip(self._tables, self._rows, strict=True):
            if id(table.weight) in restored:
                table.restore_gradients(rows)

    def find(self, holder: Tensor) -> Tensor | None:
        """Return the gradient that is accumulated for what holds it; None if there is none."""
        return self._gradients.get(id(holder))

    def take(self, holder: Tensor) -> Tensor | None:
        """Return the gradient that is accumulated for a tensor, which holds it no longer; None if there is none."""
        self._versions.pop(id(holder), None)
        return self._gradients.pop(id(holder), None)

    def put(self, holder: Tensor, gradient: Tensor) -> None:
        """Let a tensor hold a gradient that is accumulated."""
        self._gradients[id(holder)], self._versions[id(holder)] = gradient, gradient._version

    def _add(self, parameter: Tensor, old: float, new: float) -> None:
        accumulated, gradient = self._gradients.get(id(parameter)), parameter.grad
        if accumulated is None:
            if gradient is None:
                return
            # The program reuses the memory of its gradients in its next run, so copy.
            accumulated = self._gradients[id(parameter)] = gradient * new if new else _make_zeros(gradient)
        else:
            accumulated = self._gradients[id(parameter)] = accumulated.mul_(old) if old else _make_zeros(accumulated)
            if gradient is not None and new:
                accumulated.add_(gradient, alpha=new)
        parameter.grad = accumulated

    def _require_unchanged(self, *, job: str, line: str) -> None:
        """Raise `StepError` if the script has changed the accumulated gradients in place since the last call."""
        if any(gradient._version != self._versions[key] for key, gradient in self._gradients.items()):
            raise StepError(
                expected=f"gradients that only job {job!r} changes until its step",
                found="gradients that the script has changed in place between two calls of one step",
                fix="delete zero_grad(set_to_none=False), or another change of .grad, after the job's call",
                where=line,
            )

    def _require_equal_kinds(
        self, parameters: Sequence[Tensor], weights: Sequence[LossWeight], *, job: str, line: str
    ) -> None:
        """Raise `StepError` for a loss that is a mean in one call of a step and a sum in another, unless it is zero.

        `loss.sum() / max(mask.sum(), 1)` is the sum of nothing where no target is valid.
        """
        is_sum_after_mean = not weights and self._earlier is not None
        is_mean_after_sum = bool(weights) and self._earlier is None and self.calls > 0
        gradients = self._gradients.values() if is_mean_after_sum else [item.grad for item in parameters]
        if (is_sum_after_mean or is_mean_after_sum) and any(map(_has_values, gradients)):
            raise StepError(
                expected=f"a loss of job {job!r} that is a mean in all calls of a step, or a sum in all of them",
                found="a mean in one call, and a sum in another",
                fix="divide by the number of rows or of valid targets in every call, or train without accumulate=",
                where=line,
            )

    def _compute_factors(self, weights: Sequence[LossWeight], *, job: str, line: str) -> tuple[float, float]:
        """Return the factors of the accumulated gradient and of the new one."""
        if not weights:
            return 1.0, 1.0
        self._require_proportion(weights, job=job, line=line)
        weight = weights[0]
        before = self._earlier
        self._earlier = together = weight.add_total(0.0 if before is None else before.total)
        if not together.divisor:
            return 0.0, 1.0
        # There is nothing to keep before the first call, and after calls without a valid target.
        old = 0.0 if before is None or not before.total else before.divisor / together.divisor
        return old, weight.divisor / together.divisor

    def _require_proportion(self, weights: Sequence[LossWeight], *, job: str, line: str) -> None:
        """Require that the weights of several terms of one loss keep their proportion."""
        ratios = tuple(weight.total / weights[0].total if weights[0].total else 1.0 for weight in weights)
        if not self._ratios:
            self._ratios = ratios
        pairs = zip(ratios, self._ratios, strict=False)
        if len(ratios) != len(self._ratios) or any(
            abs(now - before) > RATIO_TOLERANCE * abs(before) for now, before in pairs
        ):
            raise StepError(
                expected=f"the terms of job {job!r}'s loss as means over counts in the same proportion in all calls of "
                "a step, because the step has one gradient for all terms",
                found=f"counts of {', '.join(f'{weight.total:,.10g}' for weight in weights)} in this call, in another "
                "proportion before",
                fix="use calls of one length in a step, divide all terms by the same count, or train without "
                "accumulate=",
                where=line,
            )


def _has_values(gradient: Tensor | None) -> bool:
    """Return whether a gradient is not zero everywhere."""
    if gradient is None:
        return False
    return bool((gradient._values() if gradient.layout == torch.sparse_coo else gradient).any())


def _make_zeros(gradient: Tensor) -> Tensor:
    """Return zeros with the layout of a gradient; of a sparse one for the same rows, which a step may touch."""
    if gradient.layout != torch.sparse_coo:
        return torch.zeros_like(gradient)
    values = torch.zeros_like(gradient._values())
    zeros = torch.sparse_coo_tensor(gradient._indices(), values, gradient.shape, check_invariants=False)
    return zeros._coalesced_(gradient.is_coalesced())

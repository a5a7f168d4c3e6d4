"""Gradients of parameters that no optimizer of a job steps: they add up over calls, as in the plain script.

`optimizer.zero_grad()` clears the gradients of the optimizer's own parameters only. So a job clears those too, and no
others: the gradients of a second network, of a head that is not trained yet, or of a parameter that replaced another.
"""

import contextlib
from collections.abc import Iterator, Sequence

from torch import Tensor

from rankless.jobs.definition import JobDefinition


class OtherGradients:
    """Adds what each call computes to the gradients of these parameters."""

    def __init__(self) -> None:
        self._before: dict[int, Tensor] = {}
        """Their gradients before the first call of a step, by the parameter's id."""
        self._shown: dict[int, Tensor] = {}
        """Their gradients after the latest call."""

    @contextlib.contextmanager
    def add_up(self, job: JobDefinition, *, is_first: bool) -> Iterator[None]:
        """Within the context a call computes gradients, which are then added to those that were there before.

        Args:
            job: The job.
            is_first: Whether it is the first call of a step. A later one computes that of all its calls.
        """
        others = find_others(job) if job.trains else []
        given = [(item, item.grad) for item in others]
        before = {
            id(item): self._before.get(id(item)) if not is_first and self._shown.get(id(item)) is gradient else gradient
            for item, gradient in given
            if gradient is not None
        }
        self._before = {key: gradient for key, gradient in before.items() if gradient is not None}
        for item in others:
            item.grad = None
        is_done = False
        try:
            yield
            is_done = True
        finally:
            if not is_done:
                for item, gradient in given:
                    item.grad = gradient
        for item in others:
            known = self._before.get(id(item))
            if known is not None:
                item.grad = known if item.grad is None else known + item.grad
        self._shown = {id(item): item.grad for item in others if item.grad is not None}


def find_others(job: JobDefinition) -> Sequence[Tensor]:
    """Return the parameters of a job's modules that none of its optimizers has."""
    stepped = {id(item) for optimizer in job.optimizers for group in optimizer.param_groups for item in group["params"]}
    return [item for item in job.parameters() if id(item) not in stepped]

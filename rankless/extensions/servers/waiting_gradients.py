"""Gradients of a table's rows between the backward pass and the optimizer's step.

Note [the gradient of a table]: rows are not parameters: they come and go, and PyTorch's optimizers would need memory
for all possible ones. A parameter of one row, the table's weight, stands for them in optimizers, parameter groups and
schedules. Each lookup adds ones to its sparse gradient, and the rows' gradients wait here. PyTorch then refuses what
it refuses for all sparse gradients. Where `zero_grad()` removes the weight's gradient, the waiting ones are forgotten.
Where the script or a `GradScaler` scales it, its first number changes, and the waiting ones are scaled as much. The
second number is not finite if a gradient of the rows is not, so that a `GradScaler` sees it and skips the step.
An optimizer may change the gradient too, in place: `SGD(nesterov=True, foreach=True)` does, which is the default on a
GPU. So the scale is read before the step, and a second step with a gradient that a first one changed is refused.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rankless.errors import TableError
from rankless.extensions.servers.tables.row_gradients import RowGradients, multiply_gradients, sum_gradients


class WaitingGradients:
    """Gradients of one table's rows that wait for the optimizer's step; see Note [the gradient of a table]."""

    def __init__(self, weight: nn.Parameter) -> None:
        """Wait for the gradients of a weight, of shape (1, 2)."""
        self._weight = weight
        self._in_backward: dict[int, list[RowGradients]] = {}
        self._accumulated: list[RowGradients] = []
        self._scale: float | None = None
        self._changed_by_step = False
        self._hook: RemovableHandle | None = None
        self._prepared_factor: float | None = None

    def add(self, added: RowGradients) -> Tensor:
        """Add gradients within a backward pass. They count once the pass accumulates the weight's gradient.

        Returns:
            The gradient of the weight that the pass must accumulate.
        """
        self.follow_weight()
        if self._hook is None:
            self._hook = self._weight.register_post_accumulate_grad_hook(self._accumulate)
        # Passes can be nested (reentrant activation checkpoints), and one that failed never accumulates.
        self._in_backward.setdefault(torch._C._current_graph_task_id(), []).append(added)
        sign = -1 if self._scale is not None and self._scale < 0 else 1  # so that the numbers never cancel out
        entry = self._make_entry(sign=sign, is_finite=bool(np.isfinite(added.gradients).all()))
        return torch.sparse_coo_tensor(
            torch.zeros(1, 1, dtype=torch.int64, device=entry.device), entry, entry.shape, check_invariants=False
        )

    def begin_program(self) -> None:
        """Forget all gradients: a captured program begins, whose gradients `add_of_program` adds."""
        self.close()  # a captured program calls no hooks
        self._in_backward.clear()
        self._accumulated = []
        self._scale, self._changed_by_step = None, False
        self._prepared_factor = None

    def add_of_program(self, added: RowGradients) -> Tensor:
        """Add gradients of a captured program. Return the dense gradient of the weight that the program gives."""
        self._accumulated.append(added)
        return self._make_entry(is_finite=bool(np.isfinite(added.gradients).all()))

    def prepare(self) -> RowGradients | None:
        """Return the gradients of a program; None if it has none. Until the step only their factor changes."""
        if self._accumulated:
            self._accumulated = [sum_gradients(self._accumulated)]
        self._prepared_factor = 1.0
        return self._accumulated[0] if self._accumulated else None

    def take_prepared_factor(self) -> float | None:
        """Return by what the prepared gradients have been multiplied, once; None if none are prepared."""
        factor, self._prepared_factor = self._prepared_factor, None
        return factor

    def end_program(self) -> None:
        """Note the gradient that a captured program has given the weight: the sum over lookups and workers."""
        self._scale = self._weight_scale()

    def join(self, before: RowGradients | None, factors: tuple[float, float]) -> RowGradients | None:
        """Let the next step have the gradients of several calls of a job, whose weight has the joint gradient already.

        Args:
            before: The gradients of earlier calls.
            factors: By what to multiply these, and those of the last call.

        Returns:
            The joint gradients; None if there are none.
        """
        old, new = factors
        parts = [
            *([] if before is None else [multiply_gradients(before, old)]),
            *(multiply_gradients(each, new) for each in self._accumulated),
        ]
        joint = sum_gradients(parts) if parts else None
        self.replace(joint)
        return joint

    def replace(self, gradients: RowGradients | None) -> None:
        """Let these be all gradients of the next step. The weight has the gradient that stands for them already."""
        self._accumulated = [] if gradients is None else [gradients]
        self._scale = self._weight_scale()

    def _make_entry(self, *, sign: int = 1, is_finite: bool = True) -> Tensor:
        """Return the gradient of the weight for gradients of rows, of shape (1, 2)."""
        entry = torch.full_like(self._weight, sign, requires_grad=False)
        if not is_finite:
            entry[:, 1] = torch.nan
        return entry

    def take(self) -> RowGradients | None:
        """Return the sum of gradients for a step that PyTorch's optimizer has made, None if there are none.

        They stay, as PyTorch's do. Call `prepare_step` before the optimizer's step.
        """
        self._in_backward.clear()
        scale = self._weight_scale()
        self._changed_by_step, self._scale = scale != self._scale, scale
        if not self._accumulated:
            return None
        total = sum_gradients(self._accumulated)
        # The same gradients may be used in another step, in which the ids do not occur once more.
        self._accumulated = [replace(total, occurrences=np.zeros_like(total.occurrences))]
        return total

    def close(self) -> None:
        """Wait no longer for backward passes, until the next gradient."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def follow_weight(self) -> None:
        """Forget or scale the waiting gradients as the script has done with the weight's."""
        scale = self._weight_scale()
        if scale is None:
            self._accumulated = []
            self._prepared_factor = None
        elif scale != self._scale and self._accumulated:
            factor = scale / self._scale if self._scale else 0.0
            if self._prepared_factor is not None:
                self._prepared_factor *= factor
            self._accumulated = [multiply_gradients(part, factor) for part in self._accumulated]
        if not scale:
            self._changed_by_step = False
        self._scale = scale

    def prepare_step(self) -> None:
        """Follow the weight before an optimizer's step.

        Raises TableError if the optimizer has changed the gradients in its last step, and they have not been cleared.
        """
        self.follow_weight()
        if self._changed_by_step:
            raise TableError(
                expected="gradients of a table that are cleared after a step with nesterov=True and foreach=True",
                found="gradients that the optimizer has changed in place, and that another step would use",
                fix="call zero_grad() after the step, or pass foreach=False to the optimizer",
            )

    def _accumulate(self, _: Tensor) -> None:
        self._accumulated += self._in_backward.pop(torch._C._current_graph_task_id(), [])
        self._scale = self._weight_scale()

    def _weight_scale(self) -> float | None:
        """Return the first number of the weight's gradient, None if the gradient has been cleared."""
        gradient = self._weight.grad
        if gradient is None:
            return None
        numbers = gradient._values()[:, 0] if gradient.is_sparse else gradient[:, 0]
        return float(numbers.sum()) if len(numbers) else None

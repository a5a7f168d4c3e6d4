"""A table in training on one device: lookups that autograd knows, and steps together with the script's optimizers."""

import weakref
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from rankless.errors import TableError
from rankless.parameter_server.optimizer_steps import has_stepped, require_known, settings_of
from rankless.parameter_server.tables.distinct_ids import find_distinct, sum_rows
from rankless.parameter_server.tables.table import Table
from rankless.parameter_server.waiting_gradients import RowGradients, WaitingGradients, no_gradients


class TableTraining:
    """The table of one weight, a parameter that stands for all rows; see Note [the gradient of a table]."""

    def __init__(self, table: Table, weight: nn.Parameter, padding_id: int | None) -> None:
        """Step the table whenever an optimizer steps the weight, as long as this object lives."""
        self.table = table
        self.weight = weight
        self.dtype = weight.dtype
        self._padding_id = padding_id
        self._waiting = WaitingGradients(weight)
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._earlier_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._had_stepped = False
        own = weakref.ref(self)

        def before_step(optimizer: Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            if (training := own()) is None or training._group_of(optimizer) is None:
                return None
            training._prepare(optimizer)
            return training._follow_until_step(arguments, keywords)

        def after_step(optimizer: Optimizer, *_: Any) -> None:
            if (training := own()) is not None:
                training._step(optimizer)

        handles = (register_optimizer_step_pre_hook(before_step), register_optimizer_step_post_hook(after_step))
        self._remove_hooks = [weakref.finalize(self, handle.remove) for handle in handles]

    def close(self) -> None:
        """Step the table no longer: something else steps it."""
        self._waiting.close()
        for remove in self._remove_hooks:
            remove()

    def look_up(self, ids: Tensor) -> Tensor:
        """Return the rows of ids, of shape (*ids.shape, dim). Ids are int32 or int64, on any device."""
        if not (torch.is_grad_enabled() and self.weight.requires_grad):
            rows = self.read(ids.detach().reshape(-1).to("cpu", torch.int64).numpy())
            return rows.reshape(*ids.shape, rows.shape[1]).to(self.weight.device)
        looked_up: Tensor = _Lookup.apply(self.weight, ids, self)  # type: ignore[no-untyped-call]  # untyped in PyTorch
        return looked_up

    def read(self, ids: NDArray[np.int64]) -> Tensor:
        """Return the rows of ids, int64, of shape (n,), on a CPU."""
        rows = self.table.pull(ids)
        if self._padding_id is not None:
            rows[ids == self._padding_id] = 0
        return torch.from_numpy(rows)

    def add_gradients(self, added: RowGradients) -> Tensor:
        """Add gradients within a backward pass. Return the gradient of the weight."""
        if self._padding_id is not None:
            kept = added.ids != self._padding_id
            added = RowGradients(added.ids[kept], added.occurrences[kept], added.gradients[kept])
        return self._waiting.add(added)

    def _prepare(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer before it steps other parameters, and remember what its step will change."""
        self._had_stepped = has_stepped(optimizer, self.weight)
        if self.weight.grad is not None:
            require_known(optimizer)
            self._use_optimizer(optimizer)

    def _follow_until_step(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Let the waiting gradients see what the script has done to them, before the optimizer changes them itself.

        Returns:
            None, or the arguments of the step with another closure.
        """
        closure = arguments[1] if len(arguments) > 1 else keywords.get("closure")
        if closure is None:
            self._waiting.prepare_step()
            return None

        def followed() -> Any:
            loss = closure()
            self._waiting.prepare_step()
            return loss

        if len(arguments) > 1:
            return (arguments[0], followed, *arguments[2:]), keywords
        return arguments, {**keywords, "closure": followed}

    def _use_optimizer(self, optimizer: Optimizer) -> None:
        """Let the table begin with new states if another optimizer steps the weight than before."""
        current = None if self._optimizer is None else self._optimizer()
        if optimizer is current:
            return
        if optimizer in self._earlier_optimizers:
            raise TableError(
                expected="one optimizer at a time for a table's weight, because its states are with the rows",
                found="an optimizer that has stepped it before another one did",
                fix="step the weight with one optimizer",
            )
        if current is not None:
            self._earlier_optimizers.add(current)
        if not self._had_stepped:
            self.table.reset_states()
        self._optimizer = weakref.ref(optimizer)

    def _step(self, optimizer: Optimizer) -> None:
        group = self._group_of(optimizer)
        if group is None or self.weight.grad is None:
            return
        self._use_optimizer(optimizer)  # a closure may have made the first gradient within the step
        self.weight.detach().zero_()  # what the optimizer did to it means nothing
        settings = settings_of(optimizer, group)
        # A gradient that was zeroed in place is one without rows: the step counts, and rows with momentum move.
        gradients = self._waiting.take() or no_gradients(self.table.settings)
        self.table.push(gradients.ids, gradients.occurrences, gradients.gradients, settings)

    def _group_of(self, optimizer: Optimizer) -> dict[str, Any] | None:
        for group in optimizer.param_groups:
            if any(parameter is self.weight for parameter in group["params"]):
                return group
        return None


class _Lookup(torch.autograd.Function):
    """Rows of ids, whose gradients go to the table."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, training: TableTraining) -> Tensor:
        all_ids = ids.detach().reshape(-1).to("cpu", torch.int64).numpy()
        ctx.training = training
        # Equal ids read one row, so that their gradients are summed without looking the row up again.
        ctx.ids, ctx.places, ctx.occurrences = find_distinct(all_ids)
        rows = training.read(ctx.ids)[torch.from_numpy(ctx.places)]
        return rows.reshape(*ids.shape, rows.shape[1]).to(weight.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        rows = gradient.detach().reshape(-1, gradient.shape[-1]).cpu().contiguous().numpy()
        sums = sum_rows(rows, ctx.places, len(ctx.ids))
        weight_gradient = ctx.training.add_gradients(RowGradients(ctx.ids, ctx.occurrences, sums))
        return weight_gradient, None, None

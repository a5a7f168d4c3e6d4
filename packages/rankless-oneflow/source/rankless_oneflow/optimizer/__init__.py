"""`oneflow.optimizer`: optimizers with their learning rates. `minimize(loss)` in a job makes it a train job's."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..graph import current_call
from ..missing import getattr_of, refuse, refuse_given
from .schedules import CosineScheduler, PiecewiseConstantScheduler, Scheduler
from .steps import MomentumSGD, UncorrectedAdam

__all__ = ["SGD", "Adam", "CosineScheduler", "PiecewiseConstantScheduler"]

__getattr__ = getattr_of("optimizer")


class _Optimizer:
    """What all optimizers have."""

    def __init__(self, lr_scheduler: Scheduler, **not_taken: Any) -> None:
        function = f"flow.optimizer.{type(self).__name__}"
        refuse_given(function, **not_taken)
        if not isinstance(lr_scheduler, Scheduler):
            fix = "pass flow.optimizer.PiecewiseConstantScheduler([], [0.1]) for a constant learning rate"
            raise refuse(function, f"lr_scheduler={lr_scheduler!r}", fix)
        self.lr_scheduler = lr_scheduler

    def minimize(self, loss: Tensor | Sequence[Tensor]) -> None:
        """Make this the optimizer of the job, and `loss` what it minimizes.

        Args:
            loss: A blob; its mean is minimized. Of a list of blobs, the sum of their means.

        Raises:
            ConfigError: The call stands outside a job, the job predicts, or `loss` is no blob.
        """
        call = current_call("minimize")
        losses = list(loss) if isinstance(loss, Sequence) else [loss]
        if not call.trains:
            fix = 'write @flow.global_function(type="train")'
            raise refuse("minimize", "a call of it in a predict job", fix)
        if not losses or not all(isinstance(each, Tensor) for each in losses):
            raise refuse("minimize", f"{loss!r}", "pass the loss that the job has computed")
        call.minimize(self, losses)

    def make(self, parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
        """Return the optimizer of PyTorch that makes the steps."""
        raise NotImplementedError


class SGD(_Optimizer):
    """Gradient descent, with momentum 0.9 unless you pass another one: v = momentum * v - lr * g, p = p + v."""

    def __init__(
        self,
        lr_scheduler: Scheduler,
        loss_scale_factor: float | None = None,
        momentum: float = 0.9,
        **not_taken: Any,
    ) -> None:
        super().__init__(lr_scheduler, loss_scale_factor=loss_scale_factor, **not_taken)
        self.momentum = momentum

    def make(self, parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
        """Return the optimizer of PyTorch that makes the steps."""
        rate = self.lr_scheduler.rate(0)
        if self.momentum:
            return MomentumSGD(parameters, rate, self.momentum)
        return torch.optim.SGD(parameters, lr=rate)


class Adam(_Optimizer):
    """Adam, without correction of the bias unless you pass `do_bias_correction=True`."""

    def __init__(
        self,
        lr_scheduler: Scheduler,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        do_bias_correction: bool = False,
        **not_taken: Any,
    ) -> None:
        super().__init__(lr_scheduler, **not_taken)
        self.betas, self.epsilon, self.corrects = (beta1, beta2), epsilon, do_bias_correction

    def make(self, parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
        """Return the optimizer of PyTorch that makes the steps."""
        rate = self.lr_scheduler.rate(0)
        if not self.corrects:
            return UncorrectedAdam(parameters, rate, self.betas, self.epsilon)
        return torch.optim.Adam(parameters, lr=rate, betas=self.betas, eps=self.epsilon)

"""The steps of OneFlow's optimizers that `torch.optim` makes in another way.

OneFlow's momentum contains the learning rate of its time, v = m v - lr g. PyTorch multiplies by the present one. The
two agree while the learning rate is constant. OneFlow's Adam corrects no bias unless the script asks for it.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class MomentumSGD(torch.optim.Optimizer):
    """Steps v = momentum * v - lr * gradient, p = p + v."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, momentum: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Make a step."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                velocity = state["momentum"].mul_(group["momentum"]).add_(parameter.grad, alpha=-group["lr"])
                parameter.add_(velocity)
        return loss


class UncorrectedAdam(torch.optim.Optimizer):
    """Steps p = p - lr * m / (sqrt(v) + eps), with means m and v that begin at 0."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Make a step."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"], state["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                mean = state["mean"].mul_(first).add_(parameter.grad, alpha=1 - first)
                square = state["square"].mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
                parameter.addcdiv_(mean, square.sqrt().add_(group["eps"]), value=-group["lr"])
        return loss

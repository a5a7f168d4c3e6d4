"""FTRL-proximal, an optimizer that makes many weights exactly zero."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from rankless.errors import ConfigError

STATES = ("square_sum", "linear")
"""The states of an element: the sum of squared gradients, without its initial value, and the linear term."""


class FTRL(Optimizer):
    """Steps parameters by FTRL-proximal (McMahan and others, "Ad click prediction", KDD 2013), per element.

    It takes dense gradients, and sparse ones, of which it changes the rows that have a gradient. Tables and servers
    make the same steps. An element w with the gradient g has n, the sum of all g², and z, the linear term:

        z += g - (n_new ** -lr_power - n_old ** -lr_power) / lr * w
        w = 0 where abs(z) <= l1, else (sign(z) * l1 - z) / ((beta + n_new ** -lr_power) / lr + l2)

    Args:
        params: Parameters, or groups of them.
        lr: The learning rate, more than 0.
        lr_power: With which power of n the learning rate of an element falls, at most 0. -0.5 is the paper's.
        initial_accumulator_value: Where n begins, at least 0. It may not change between steps.
        l1: Weight of the sum of absolute values, at least 0. It makes elements zero.
        l2: Weight of half the sum of squares, at least 0. TensorFlow's is half of this one.
        beta: Added to n ** -lr_power, at least 0.

    Raises:
        ConfigError: A setting is out of range.

    Example:
        >>> embedding = torch.nn.Embedding(10, 4, sparse=True)
        >>> optimizer = rankless.parameter_server.FTRL(embedding.parameters(), lr=0.1, l1=0.01)
        >>> embedding(torch.tensor([3])).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.001,
        *,
        lr_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1: float = 0.0,
        l2: float = 0.0,
        beta: float = 0.0,
    ) -> None:
        settings = {
            "lr": lr,
            "lr_power": lr_power,
            "initial_accumulator_value": initial_accumulator_value,
            "l1": l1,
            "l2": l2,
            "beta": beta,
        }
        super().__init__(params, settings)
        for group in self.param_groups:
            require_in_range(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step.

        Args:
            closure: Computes the loss and its gradients again. None: gradients are there.

        Returns:
            What the closure returns, None without one.

        Raises:
            ConfigError: A setting has been changed and is out of range.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            require_in_range(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)
        return loss

    def _step(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            state.update({key: torch.zeros_like(parameter, memory_format=torch.preserve_format) for key in STATES})
        state["step"] += 1
        if not gradient.is_sparse:
            update(parameter, gradient, state["square_sum"], state["linear"], group)
            return
        gradient = gradient.coalesce()
        places = tuple(gradient._indices())
        parts = [tensor[places] for tensor in (parameter, *(state[key] for key in STATES))]
        update(parts[0], gradient._values(), parts[1], parts[2], group)
        for tensor, part in zip((parameter, *(state[key] for key in STATES)), parts, strict=True):
            tensor.index_put_(places, part)


def update(value: Tensor, gradient: Tensor, square_sum: Tensor, linear: Tensor, group: dict[str, Any]) -> None:
    """Change elements and their states in place, by one step with the settings of a group."""
    rate, power = float(group["lr"]), -float(group["lr_power"])
    initial, l1 = float(group["initial_accumulator_value"]), float(group["l1"])
    before = (square_sum + initial).pow_(power)
    square_sum.addcmul_(gradient, gradient)
    after = (square_sum + initial).pow_(power)
    linear.add_(gradient).sub_((after - before).div_(rate).mul_(value))
    curvature = (after + float(group["beta"])) / rate + float(group["l2"])
    found = (linear.sign() * l1 - linear) / curvature
    value.copy_(torch.where((linear.abs() <= l1) | (curvature == 0), torch.zeros_like(found), found))


def require_in_range(group: dict[str, Any]) -> None:
    """Raise ConfigError for a setting that is out of range or no number."""
    least = {key: float(group[key]) for key in ("initial_accumulator_value", "l1", "l2", "beta")}
    settings = {"lr": float(group["lr"]), "lr_power": float(group["lr_power"]), **least}
    if settings["lr"] > 0 and settings["lr_power"] <= 0 and all(0 <= value < float("inf") for value in least.values()):
        return
    raise ConfigError(
        expected="FTRL with lr of more than 0, lr_power of at most 0, and other settings of at least 0",
        found=", ".join(f"{key}={value}" for key, value in settings.items()),
        fix="change the settings, or the schedule of lr",
    )

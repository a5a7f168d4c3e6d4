"""Settings of tables' steps, read from the script's own optimizers."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from rankless.errors import TableError
from rankless.extensions.servers.ftrl import FTRL
from rankless.extensions.servers.tables.optimizers import (
    AdagradSettings,
    FtrlSettings,
    OptimizerSettings,
    SgdSettings,
    SparseAdamSettings,
)


def settings_of(optimizer: Optimizer, group: Mapping[str, Any]) -> OptimizerSettings:
    """Return the settings of one step for a parameter group. Raises TableError for other optimizers.

    PyTorch's optimizer has made its step before, so it has refused what it cannot do with sparse gradients.
    """
    if type(optimizer) is FTRL:
        return ftrl_settings_of(group)
    maximize = bool(group.get("maximize", False))
    rate = float(group["lr"])
    if type(optimizer) is SGD:
        momentum, dampening = float(group["momentum"]), float(group["dampening"])
        return SgdSettings(
            lr=rate, momentum=momentum, dampening=dampening, nesterov=group["nesterov"], maximize=maximize
        )
    if type(optimizer) is Adagrad:
        return AdagradSettings(
            lr=rate,
            lr_decay=group["lr_decay"],
            eps=group["eps"],
            initial_accumulator_value=optimizer.defaults["initial_accumulator_value"],
            maximize=maximize,
        )
    if type(optimizer) is SparseAdam:
        return SparseAdamSettings(
            lr=rate, betas=(float(group["betas"][0]), float(group["betas"][1])), eps=group["eps"], maximize=maximize
        )
    raise _unknown_error(optimizer)


def ftrl_settings_of(group: Mapping[str, Any]) -> FtrlSettings:
    """Return the settings of one step of FTRL."""
    names = ("lr", "lr_power", "initial_accumulator_value", "l1", "l2", "beta")
    return FtrlSettings(**{name: float(group[name]) for name in names})


def require_known(optimizer: Optimizer) -> None:
    """Raise TableError unless a table can make the steps of an optimizer."""
    if type(optimizer) not in (SGD, Adagrad, SparseAdam, FTRL):
        raise _unknown_error(optimizer)


def has_stepped(optimizer: Optimizer, weight: nn.Parameter) -> bool:
    """Return whether an optimizer has states of earlier steps for a weight, for example from a checkpoint."""
    state = optimizer.state.get(weight, {})
    return float(state.get("step", 0)) > 0 or state.get("momentum_buffer") is not None


def _unknown_error(optimizer: Optimizer) -> TableError:
    return TableError(
        expected="torch.optim.SGD, Adagrad, SparseAdam or rankless.parameter_server.FTRL for a table's weight",
        found=type(optimizer).__qualname__,
        fix="give the tables' weights an optimizer of their own",
    )

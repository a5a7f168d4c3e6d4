"""States of PyTorch's optimizers for one dense parameter, as the states of rows have them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, SparseAdam

from rankless.errors import TableError
from rankless.extensions.servers.ftrl import FTRL, STATES
from rankless.extensions.servers.optimizer_steps import ftrl_settings_of
from rankless.extensions.servers.tables.optimizers import AdagradSettings, AdamSettings, OptimizerSettings, SgdSettings
from rankless.extensions.servers.tables.row_optimizers import (
    AdagradRows,
    AdamRows,
    AmsgradRows,
    FtrlRows,
    MomentumRows,
    SgdRows,
    SparseAdamRows,
)

_KNOWN: tuple[type[Optimizer], ...] = (SGD, Adagrad, Adam, AdamW, FTRL)
_KEYS: dict[str, tuple[str, ...]] = {
    SgdRows.name: (),
    MomentumRows.name: ("momentum_buffer",),
    AdagradRows.name: ("sum",),
    AdamRows.name: ("exp_avg", "exp_avg_sq"),
    SparseAdamRows.name: ("exp_avg", "exp_avg_sq"),
    FtrlRows.name: STATES,
    AmsgradRows.name: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
}
"""By the name of a row optimizer, the states that PyTorch's optimizer keeps in the order of a row's."""


class ParameterStates(NamedTuple):
    """The states of a parameter.

    Args:
        optimizer: The name of the row optimizer. Empty: there has been no step.
        steps: Number of steps.
        states: Tensors of the parameter's shape.
    """

    optimizer: str
    steps: int
    states: tuple[Tensor, ...]


def require_known_for_parameters(optimizer: Optimizer) -> None:
    """Raise TableError unless servers can make the steps of an optimizer on dense parameters."""
    if type(optimizer) not in _KNOWN:
        raise TableError(
            expected="torch.optim.SGD, Adagrad, Adam, AdamW or rankless.parameter_server.FTRL on servers",
            found=type(optimizer).__qualname__,
            fix="use one of these, or --server-mode sync, where workers step their parameters themselves",
        )


def dense_settings_of(optimizer: Optimizer, group: Mapping[str, Any]) -> OptimizerSettings:
    """Return the settings of one step of a known optimizer for a parameter group with dense gradients."""
    if isinstance(optimizer, FTRL):
        return ftrl_settings_of(group)
    common = {"lr": float(group["lr"]), "weight_decay": float(group["weight_decay"]), "maximize": group["maximize"]}
    if isinstance(optimizer, SGD):
        return SgdSettings(
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            nesterov=group["nesterov"],
            **common,
        )
    if isinstance(optimizer, Adagrad):
        return AdagradSettings(
            lr_decay=group["lr_decay"],
            eps=group["eps"],
            initial_accumulator_value=optimizer.defaults["initial_accumulator_value"],
            **common,
        )
    return AdamSettings(
        betas=(float(group["betas"][0]), float(group["betas"][1])),
        eps=float(group["eps"]),
        amsgrad=group["amsgrad"],
        # Since PyTorch 2.8 AdamW is an Adam whose groups say so.
        decouples_decay=bool(group.get("decoupled_weight_decay", isinstance(optimizer, AdamW))),
        **common,
    )


def read_states(optimizer: Optimizer, parameter: Tensor) -> ParameterStates:
    """Return the states that an optimizer has for a parameter, for example of a checkpoint."""
    state = optimizer.state.get(parameter, {})
    if state.get("momentum_buffer") is not None:
        buffer = state["momentum_buffer"]
        return ParameterStates(MomentumRows.name, 1, (buffer if buffer.layout == torch.strided else buffer.to_dense(),))
    steps = int(state.get("step", 0))
    if steps == 0:
        return ParameterStates("", 0, ())
    adam = SparseAdamRows.name if isinstance(optimizer, SparseAdam) else AdamRows.name
    for name in (AdagradRows.name, AmsgradRows.name, FtrlRows.name, adam):
        if all(key in state for key in _KEYS[name]):
            return ParameterStates(name, steps, tuple(state[key] for key in _KEYS[name]))
    return ParameterStates("", 0, ())


def list_state_keys(state: Mapping[str, Any]) -> Sequence[str]:
    """Return the keys of an optimizer's states that are tensors, in the order in which rows have them."""
    known = [keys for keys in _KEYS.values() if keys and all(key in state for key in keys)]
    return max(known, key=len, default=())


def write_states(optimizer: Optimizer, parameter: Tensor, found: ParameterStates) -> None:
    """Let an optimizer have the states that servers have for a parameter."""
    if not _KEYS.get(found.optimizer):
        return
    values: dict[str, Any] = dict(zip(_KEYS[found.optimizer], found.states, strict=True))
    if found.optimizer != MomentumRows.name:
        number_type = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        step = torch.tensor(float(found.steps), dtype=number_type, device="cpu")
        values["step"] = found.steps if isinstance(optimizer, SparseAdam) else step
    state = optimizer.state[parameter]
    for key, value in values.items():
        known = state.get(key)
        if isinstance(known, Tensor) and known.shape == value.shape:
            known.copy_(value)
        else:
            state[key] = value if key == "step" else value.to(parameter.device)


def list_state_versions(optimizer: Optimizer, parameter: Tensor) -> Sequence[Any]:
    """Return what changes if the script changes the states of a parameter, or loads others."""
    state = optimizer.state.get(parameter, {})
    return [
        (key, id(value), value._version) if isinstance(value, Tensor) else (key, value)
        for key, value in sorted(state.items())
    ]

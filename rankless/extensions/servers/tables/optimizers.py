"""The optimizers of tables: settings of one step, under the names that PyTorch's parameter groups have."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SgdSettings:
    """One step of `torch.optim.SGD`. With momentum, all rows that ever had a gradient move in each step.

    With `weight_decay` every step must have a gradient for each row.
    """

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    maximize: bool = False


@dataclass(frozen=True, kw_only=True)
class AdagradSettings:
    """One step of `torch.optim.Adagrad`."""

    lr: float
    lr_decay: float = 0.0
    eps: float = 1e-10
    initial_accumulator_value: float = 0.0
    weight_decay: float = 0.0
    maximize: bool = False


@dataclass(frozen=True, kw_only=True)
class SparseAdamSettings:
    """One step of `torch.optim.SparseAdam`."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    maximize: bool = False


@dataclass(frozen=True, kw_only=True)
class AdamSettings:
    """One step of `torch.optim.Adam`, or of `AdamW` with `decouples_decay`."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False
    decouples_decay: bool = False
    maximize: bool = False


@dataclass(frozen=True, kw_only=True)
class FtrlSettings:
    """One step of `rankless.parameter_server.FTRL`."""

    lr: float
    lr_power: float = -0.5
    initial_accumulator_value: float = 0.1
    l1: float = 0.0
    l2: float = 0.0
    beta: float = 0.0


OptimizerSettings = SgdSettings | AdagradSettings | SparseAdamSettings | AdamSettings | FtrlSettings

"""Optimizers of rows: how many states a row has, and how a step changes rows."""

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rankless.errors import TableError
from rankless.extensions.servers.tables.contents import TableContents, TableState
from rankless.extensions.servers.tables.id_map import IdMap
from rankless.extensions.servers.tables.momentum import MomentumHistory
from rankless.extensions.servers.tables.optimizers import (
    AdagradSettings,
    AdamSettings,
    FtrlSettings,
    OptimizerSettings,
    SgdSettings,
    SparseAdamSettings,
)
from rankless.extensions.servers.tables.rows import Rows
from rankless.extensions.servers.tables.table_memory import TableMemory
from rankless.extensions.servers.tables.undo_log import remember_elements, remember_rows
from rankless.extensions.servers.tables.updates import (
    AdamScalars,
    FtrlScalars,
    MomentumScalars,
    catch_up_states,
    subtract_movements,
    update_adagrad,
    update_adam,
    update_ftrl,
    update_momentum,
    update_sgd,
    update_sparse_adam,
)

Floats = NDArray[np.floating]
Numbers = NDArray[np.int64]


PART_BYTES = 512 << 10
"""Rows that are noted are still in the processor's cache when they are updated."""


def noted_parts(rows: Rows, row_numbers: Numbers) -> Iterator[slice]:
    """Yield the parts of a step, each after its rows have been noted in the log. Without a log it is one part."""
    count = len(row_numbers)
    if len(rows.log.words) == 0:
        yield slice(count)
        return
    part_rows = max(256, PART_BYTES // (rows.values.shape[1] * rows.values.itemsize))
    for first in range(0, count, part_rows):
        part = slice(first, first + part_rows)
        remember_rows(rows.log, rows.values, row_numbers[part])
        yield part


class RowOptimizer(Protocol):
    """Steps the rows of one table.

    Attributes:
        name: Name in stored tables.
        states: Number of states of a row, each with as many elements as the row has values.
        initial_state: What the states of a new row hold.
        steps: Number of steps so far.
    """

    name: str
    states: int
    initial_state: float
    steps: int

    def accepts(self, settings: OptimizerSettings) -> bool:
        """Return whether settings are of this optimizer."""

    def step(self, rows: Rows, row_numbers: Numbers, gradients: Floats, settings: OptimizerSettings) -> None:
        """Step rows with gradients of shape (rows, dim). Rows with a negative number are left out."""


class SgdRows:
    """SGD without momentum."""

    name = "SGD"
    states = 0
    initial_state = 0.0

    def __init__(self, steps: int = 0) -> None:
        self.steps = steps

    def accepts(self, settings: OptimizerSettings) -> bool:
        """Return whether settings are SGD's without momentum."""
        return isinstance(settings, SgdSettings) and settings.momentum == 0

    def step(self, rows: Rows, row_numbers: Numbers, gradients: Floats, settings: OptimizerSettings) -> None:
        """Step rows."""
        self.steps += 1
        for part in noted_parts(rows, row_numbers):
            update_sgd(rows, row_numbers[part], gradients[part], settings.lr)


class MomentumRows:
    """SGD with momentum. Where a step has momentum 0, buffers stay, as in PyTorch."""

    name = "SGD with momentum"
    states = 1
    initial_state = 0.0

    def __init__(self, history: MomentumHistory, steps: int = 0) -> None:
        self.steps = steps
        self.history = history

    def accepts(self, settings: OptimizerSettings) -> bool:
        """Return whether settings are SGD's."""
        return isinstance(settings, SgdSettings)

    def step(self, rows: Rows, row_numbers: Numbers, gradients: Floats, settings: OptimizerSettings) -> None:
        """Step rows with gradients, and note how far the others move."""
        assert isinstance(settings, SgdSettings)
        if settings.momentum == 0:
            for part in noted_parts(rows, row_numbers):
                update_sgd(rows, row_numbers[part], gradients[part], settings.lr)
            return
        self.steps += 1  # PyTorch does not dampen the gradient of the first step
        factor = 1.0 if self.steps == 1 else 1 - settings.dampening
        scalars = MomentumScalars(settings.lr, settings.momentum, factor, settings.nesterov)
        state = self.history.state()
        remember_elements(rows.log, state.caught_up, row_numbers)
        for part in noted_parts(rows, row_numbers):
            update_momentum(rows, row_numbers[part], gradients[part], state, scalars)
        self.history.add_step(settings.lr, settings.momentum, nesterov=settings.nesterov)

    def catch_up(self, ids: Numbers, id_map: IdMap, rows: Rows, copies: Floats) -> None:
        """Let copies of rows, (ids, dim), or with their states, (ids, width), hold what all steps made of them."""
        subtract_movements(ids, id_map, rows, self.history.state(), copies)
        if copies.shape[1] > rows.dim:
            catch_up_states(ids, id_map, self.history.state(), copies[:, rows.dim :])

    def mark_caught_up(self, row_numbers: Numbers) -> None:
        """Take rows whose values and buffers hold all steps so far."""
        self.history.mark_caught_up(row_numbers)


class AdagradRows:
    """Adagrad. The state is the sum of squared gradients."""

    name = "Adagrad"
    states = 1

    def __init__(self, initial_state: float, steps: int = 0) -> None:
        self.initial_state = initial_state
        self.steps = steps

    def accepts(self, settings: OptimizerSettings) -> bool:
        """Return whether settings are Adagrad's."""
        return isinstance(settings, AdagradSettings)

    def step(self, rows: Rows, row_numbers: Numbers, gradients: Floats, settings: OptimizerSettings) -> None:
        """Step rows."""
        assert isinstance(settings, AdagradSettings)
        rate = settings.lr / (1 + self.steps * settings.lr_decay)
        self.steps += 1
        for part in noted_parts(rows, row_numbers):
            update_adagrad(rows, row_numbers[part], gradients[part], (rate, settings.eps))


class SparseAdamRows:
    """SparseAdam. The states are the means of gradients and of their squares."""

    name = "SparseAdam"
    states = 2
    initial_state = 0.0

    def __init__(self, steps: int = 0) -> None:
        self.steps = steps

    def accepts(self, settings: OptimizerSettings) -> bool:
        """Return whether settings are SparseAdam's."""
        return isinstance(settings, SparseAdamSettings)

    def step(self, rows: Rows, row_numbers: Numbers, gradients: Floats, settings: OptimizerSettings) -> None:
        """Step rows. The bias corrections are those of all steps, not of the row's."""
        assert isinstance(settings, SparseAdamSettings)
        self.steps += 1
        beta1, beta2 = settings.betas
        rate = settings.lr * (1 - beta2**self.steps) ** 0.5 / (1 - beta1**self.steps)
        scalars = (rate, beta1, beta2, settings.eps)
        for part in noted_parts(rows, row_numbers):
            update_sparse_adam(rows, row_numbers[part], gradients[part], scalars)


class AdamRows:
    """Adam and AdamW. The states are the means of gradients and of their squares."""

    name = "Adam"
    states = 2
    initial_state = 0.0

    def __init__(self, steps: int = 0) -> None:
        self.steps = steps

    def accepts(self, settings: OptimizerSettings) -> bool:
        """Return whether settings are Adam's without `amsgrad`."""
        return isinstance(settings, AdamSettings) and not settings.amsgrad

    def step(self, rows: Rows, row_numbers: Numbers, gradients: Floats, settings: OptimizerSettings) -> None:
        """Step rows. The bias corrections are those of all steps, not of the row's."""
        assert isinstance(settings, AdamSettings)
        self.steps += 1
        scalars = make_adam_scalars(settings, self.steps)
        for part in noted_parts(rows, row_numbers):
            update_adam(rows, row_numbers[part], gradients[part], scalars)


class AmsgradRows(AdamRows):
    """Adam and AdamW with `amsgrad`. A third state is the largest mean of squares."""

    name = "Adam with amsgrad"
    states = 3

    def accepts(self, settings: OptimizerSettings) -> bool:
        """Return whether settings are Adam's with `amsgrad`."""
        return isinstance(settings, AdamSettings) and settings.amsgrad


class FtrlRows:
    """FTRL. The states are the sum of squared gradients, without its initial value, and the linear term."""

    name = "FTRL"
    states = 2
    initial_state = 0.0

    def __init__(self, steps: int = 0) -> None:
        self.steps = steps

    def accepts(self, settings: OptimizerSettings) -> bool:
        """Return whether settings are FTRL's."""
        return isinstance(settings, FtrlSettings)

    def step(self, rows: Rows, row_numbers: Numbers, gradients: Floats, settings: OptimizerSettings) -> None:
        """Step rows."""
        assert isinstance(settings, FtrlSettings)
        self.steps += 1
        scalars = FtrlScalars(
            float(settings.lr),
            float(-settings.lr_power),
            float(settings.initial_accumulator_value),
            float(settings.l1),
            float(settings.l2),
            float(settings.beta),
        )
        for part in noted_parts(rows, row_numbers):
            update_ftrl(rows, row_numbers[part], gradients[part], scalars)


OPTIMIZER_NAMES = tuple(
    kind.name for kind in (SgdRows, MomentumRows, AdagradRows, SparseAdamRows, AdamRows, AmsgradRows, FtrlRows)
)


def make_adam_scalars(settings: AdamSettings, step: int) -> AdamScalars:
    """Return the numbers of one step, from 1 on."""
    beta1, beta2 = settings.betas
    return AdamScalars(
        settings.lr / (1 - beta1**step),
        beta1,
        beta2,
        (1 - beta2**step) ** 0.5,
        settings.eps,
        0.0 if settings.decouples_decay else settings.weight_decay,
        1 - settings.lr * settings.weight_decay if settings.decouples_decay else 1.0,
    )


def make_row_optimizer(settings: OptimizerSettings, memory: TableMemory) -> RowOptimizer:
    """Return the optimizer of settings, before its first step.

    Args:
        settings: Settings of a step.
        memory: The memory of the rows.
    """
    match settings:
        case SgdSettings(momentum=0):
            return SgdRows()
        case SgdSettings():
            return MomentumRows(MomentumHistory(memory))
        case AdagradSettings():
            return AdagradRows(settings.initial_accumulator_value)
        case SparseAdamSettings():
            return SparseAdamRows()
        case AdamSettings(amsgrad=True):
            return AmsgradRows()
        case AdamSettings():
            return AdamRows()
        case FtrlSettings():
            return FtrlRows()


def restore_row_optimizer(contents: TableContents | TableState, memory: TableMemory) -> RowOptimizer | None:
    """Return the optimizer that stored rows have the states of, if they have been stepped. Raises TableError."""
    match contents.optimizer:
        case "":
            return None
        case SgdRows.name:
            return SgdRows(contents.optimizer_steps)
        case MomentumRows.name:
            return MomentumRows(_make_history(contents, memory), contents.optimizer_steps)
        case AdagradRows.name:
            return AdagradRows(contents.initial_state, contents.optimizer_steps)
        case SparseAdamRows.name:
            return SparseAdamRows(contents.optimizer_steps)
        case AdamRows.name:
            return AdamRows(contents.optimizer_steps)
        case AmsgradRows.name:
            return AmsgradRows(contents.optimizer_steps)
        case FtrlRows.name:
            return FtrlRows(contents.optimizer_steps)
        case name:
            names = ", ".join(OPTIMIZER_NAMES)
            raise TableError(
                expected=f"rows with states of one of {names}",
                found=name,
                fix="restore the table with the version of Rankless that stored it",
            )


def _make_history(contents: TableContents | TableState, memory: TableMemory) -> MomentumHistory:
    if isinstance(contents, TableContents):
        return MomentumHistory(memory)
    return MomentumHistory(
        memory,
        steps=contents.history_steps,
        first_moving=contents.history_first_moving,
        length=contents.history_length,
    )

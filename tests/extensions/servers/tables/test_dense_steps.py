"""Steps of all rows of a table equal those of PyTorch's optimizers on a dense parameter."""

import os
from typing import Any

import numpy as np
import pytest
import torch

from rankless.extensions.servers.ftrl import FTRL
from rankless.extensions.servers.service.wire.setting_formats import (
    decode_optimizer,
    decode_table_settings,
    encode_optimizer,
    encode_table_settings,
)
from rankless.extensions.servers.tables.durable_tables import DurableTables
from rankless.extensions.servers.tables.optimizers import AdagradSettings, AdamSettings, FtrlSettings, SgdSettings
from rankless.extensions.servers.tables.settings import TableSettings
from rankless.extensions.servers.tables.table import Table

ROWS, DIM = 7, 5
IDS = np.arange(ROWS)
ADAM = {"betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}
OPTIMIZERS: dict[str, tuple[type, type, dict[str, Any], dict[str, Any]]] = {
    "sgd_decay": (torch.optim.SGD, SgdSettings, {"weight_decay": 0.1}, {}),
    "momentum_decay": (torch.optim.SGD, SgdSettings, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}, {}),
    "maximize_decay": (torch.optim.SGD, SgdSettings, {"momentum": 0.9, "weight_decay": 0.1, "maximize": True}, {}),
    "adagrad_decay": (torch.optim.Adagrad, AdagradSettings, {"weight_decay": 0.1, "lr_decay": 0.05}, {}),
    "ftrl": (FTRL, FtrlSettings, {"l1": 0.05, "l2": 0.1, "beta": 0.5}, {}),
    "ftrl_power": (FTRL, FtrlSettings, {"lr_power": -0.3, "initial_accumulator_value": 0.0, "l1": 0.01}, {}),
    "adam": (torch.optim.Adam, AdamSettings, {}, {}),
    "adam_settings": (torch.optim.Adam, AdamSettings, {**ADAM, "maximize": True}, {}),
    "amsgrad": (torch.optim.Adam, AdamSettings, {**ADAM, "amsgrad": True}, {}),
    "adamw": (torch.optim.AdamW, AdamSettings, {"weight_decay": 0.01}, {"decouples_decay": True}),
    "adamw_settings": (torch.optim.AdamW, AdamSettings, ADAM, {"decouples_decay": True}),
    "adamw_amsgrad": (torch.optim.AdamW, AdamSettings, {**ADAM, "amsgrad": True}, {"decouples_decay": True}),
}


class DenseComparison:
    """One random training, by PyTorch on a parameter and by a table with all of its rows."""

    def __init__(self, name: str, dtype: str = "float64", table: Table | None = None) -> None:
        optimizer, self._kind, self.options, self._more = OPTIMIZERS[name]
        self.table = table or Table(table_settings(dtype))
        self._generator = np.random.default_rng(0)
        self.parameter = torch.nn.Parameter(torch.from_numpy(self.table.pull(IDS)))
        self.optimizer = optimizer([self.parameter], lr=0.1, **self.options)

    def step(self, step: int) -> None:
        rate = 0.1 + 0.05 * np.sin(step)
        gradients = self._generator.normal(size=(ROWS, DIM)).astype(self.table.settings.dtype)
        before = gradients.copy()
        self.parameter.grad = torch.from_numpy(gradients.copy())
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        settings = self._kind(lr=rate, **self.options, **self._more)
        assert decode_optimizer(encode_optimizer(settings)) == settings
        self.table.push(IDS, np.ones(ROWS, np.int64), gradients, settings)
        np.testing.assert_array_equal(gradients, before)  # they are the caller's

    def difference(self) -> float:
        return float(abs(self.table.pull(IDS) - self.parameter.detach().numpy()).max())


def table_settings(dtype: str) -> TableSettings:
    return TableSettings(dim=DIM, dtype=dtype, seed=7)


@pytest.mark.ci_sample(8)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-12), ("float32", 2e-4)])
def test_all_rows_step_like_a_dense_parameter(name, dtype, bound):
    comparison = DenseComparison(name, dtype)
    for step in range(120):
        comparison.step(step)
        assert comparison.difference() < bound, step


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stored_rows_of_a_dense_parameter_continue(name):
    comparison = DenseComparison(name)
    for step in range(40):
        comparison.step(step)
        if step % 7 == 3:
            restored = Table(comparison.table.settings)
            restored.restore(comparison.table.contents())
            comparison.table = restored
    assert comparison.difference() < 1e-12


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_durable_rows_of_a_dense_parameter_continue(name):
    descriptor = os.memfd_create("tables")
    comparison = DenseComparison(name)
    for first in (0, 5):
        tables = DurableTables(descriptor, decode_table_settings)
        comparison.table = tables.open("dense", encode_table_settings(table_settings("float64")))
        for step in range(first, first + 5):
            with tables.transaction(step + 1):
                comparison.step(step)
            assert comparison.difference() < 1e-12
            tables.begin()
            comparison.table.push(IDS, np.ones(ROWS, np.int64), np.ones((ROWS, DIM)), SgdSettings(lr=1.0))
            tables.undo()
        del comparison.table
        tables.close()
    os.close(descriptor)

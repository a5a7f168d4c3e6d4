"""Steps of a table equal those of PyTorch's optimizers on an embedding with sparse gradients."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rankless.errors import TableError
from rankless.extensions.servers.tables.optimizers import (
    AdagradSettings,
    OptimizerSettings,
    SgdSettings,
    SparseAdamSettings,
)
from rankless.extensions.servers.tables.settings import TableSettings
from rankless.extensions.servers.tables.table import Table

VOCABULARY = np.arange(-20, 21) * 10**17
"""Ids of the reference embedding's rows."""

OPTIMIZERS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, SgdSettings, {}),
    "momentum": (torch.optim.SGD, SgdSettings, {"momentum": 0.9}),
    "dampening": (torch.optim.SGD, SgdSettings, {"momentum": 0.5, "dampening": 0.3}),
    "nesterov": (torch.optim.SGD, SgdSettings, {"momentum": 0.95, "nesterov": True}),
    "lasting_momentum": (torch.optim.SGD, SgdSettings, {"momentum": 1.0}),
    "maximize": (torch.optim.SGD, SgdSettings, {"momentum": 0.9, "maximize": True}),
    "adagrad": (torch.optim.Adagrad, AdagradSettings, {}),
    "adagrad_settings": (
        torch.optim.Adagrad,
        AdagradSettings,
        {"lr_decay": 0.1, "initial_accumulator_value": 0.2, "eps": 1e-3, "maximize": True},
    ),
    "sparse_adam": (torch.optim.SparseAdam, SparseAdamSettings, {}),
    "sparse_adam_settings": (
        torch.optim.SparseAdam,
        SparseAdamSettings,
        {"betas": (0.7, 0.9), "eps": 1e-3, "maximize": True},
    ),
}


class Comparison:
    """One random training, by PyTorch on an embedding of `VOCABULARY` and by a table."""

    def __init__(self, name: str, dtype: str, *, lr: Callable[[int], float] = lambda _: 0.1) -> None:
        optimizer, self._settings, self.options = OPTIMIZERS[name]
        self._lr = lr
        self.table = Table(TableSettings(dim=5, dtype=dtype, seed=7))
        self.weight = torch.nn.Parameter(torch.from_numpy(self.table.pull(VOCABULARY)))
        self.optimizer = optimizer([self.weight], lr=0.1, **self.options)
        self._generator = np.random.default_rng(0)

    def settings(self, step: int) -> OptimizerSettings:
        return self._settings(lr=self._lr(step), **self.options)

    def step(self, step: int, most_rows: int = 9) -> None:
        count = self._generator.integers(1, most_rows)
        places = torch.from_numpy(self._generator.integers(0, len(VOCABULARY), count))
        gradients = torch.from_numpy(self._generator.normal(size=(count, 5)).astype(self.table.settings.dtype))
        self.weight.grad = torch.sparse_coo_tensor(
            places[None], gradients, self.weight.shape, device="cpu", check_invariants=True
        )
        self.optimizer.param_groups[0].update(lr=self._lr(step), **self.options)
        self.optimizer.step()
        found, inverse, counts = torch.unique(places, return_inverse=True, return_counts=True)
        sums = torch.zeros_like(gradients[: len(found)]).index_add_(0, inverse, gradients)
        self.table.push(VOCABULARY[found.numpy()], counts.numpy(), sums.numpy(), self.settings(step))

    def difference(self) -> float:
        return float(abs(self.table.pull(VOCABULARY) - self.weight.detach().numpy()).max())


@pytest.mark.ci_sample(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-12), ("float32", 2e-4)])
def test_a_table_steps_like_the_optimizer(name, dtype, bound):
    comparison = Comparison(name, dtype, lr=lambda step: 0.1 + 0.05 * np.sin(step))
    for step in range(120):
        comparison.step(step)
        assert comparison.difference() < bound, step
    assert abs(comparison.weight.detach().numpy() - Table(comparison.table.settings).pull(VOCABULARY)).max() > 0.1


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.ci_sample(3)
def test_a_stored_table_continues(name):
    comparison = Comparison(name, "float64")
    for step in range(60):
        comparison.step(step)
        if step % 7 == 3:
            restored = Table(comparison.table.settings)
            restored.restore(comparison.table.contents())
            comparison.table = restored
            assert comparison.difference() < 1e-12
    assert comparison.difference() < 1e-12


def test_rows_keep_moving_for_as_long_as_their_momentum_lasts():
    comparison = Comparison("momentum", "float64")
    comparison.step(0)
    for step in range(1, 1500):  # of one row, so that all others catch up over longer than momentum lasts
        comparison.step(step, most_rows=2)
    assert comparison.difference() < 1e-12


def test_momentum_follows_its_own_schedule():
    comparison = Comparison("momentum", "float64", lr=lambda step: 0.01 * (1 + step % 5))
    for step in range(200):
        comparison.options = {"momentum": 0.85 + 0.1 * np.cos(step / 10)}
        comparison.step(step)
    assert comparison.difference() < 1e-12


def test_momentum_may_begin_pause_and_go_on():
    comparison = Comparison("sgd", "float64")
    for step in range(90):
        comparison.options = {"momentum": 0.9 if step % 30 >= 10 else 0.0}
        comparison.step(step)
        assert comparison.difference() < 1e-12, step


@pytest.mark.parametrize("second", ["adagrad", "sparse_adam", "sgd"])
@pytest.mark.parametrize("first", ["momentum", "adagrad", "sparse_adam"])
def test_another_optimizer_begins_with_new_states(first, second):
    comparison = Comparison(first, "float64")
    for step in range(20):
        comparison.step(step)
    if first == second:
        comparison.table.reset_states()
    elif first == "momentum" and second == "sgd":
        comparison.table.reset_states()  # without it, SGD keeps its buffers, as PyTorch's does where momentum becomes 0
    kind, comparison._settings, comparison.options = OPTIMIZERS[second]
    comparison.optimizer = kind([comparison.weight], lr=0.1, **comparison.options)
    for step in range(20):
        comparison.step(step)
        assert comparison.difference() < 1e-12


def test_one_element_and_odd_dims_step_as_well():
    for dim in (1, 2, 3, 17):
        table = Table(TableSettings(dim=dim, dtype="float64"))
        before = table.pull(np.array([4]))
        gradient = np.arange(1.0, dim + 1)[None]
        table.push(np.array([4]), np.array([1]), gradient, SgdSettings(lr=0.5))
        np.testing.assert_allclose(table.pull(np.array([4])), before - 0.5 * gradient, rtol=0, atol=1e-15)


def test_a_step_without_ids_counts():
    comparison = Comparison("sparse_adam", "float64")
    empty = np.empty(0, np.int64)
    for step in range(5):
        comparison.step(step)
        comparison.weight.grad = torch.sparse_coo_tensor(
            torch.empty(1, 0, dtype=torch.int64), torch.empty(0, 5, dtype=torch.float64), comparison.weight.shape
        )
        comparison.optimizer.step()
        comparison.table.push(empty, empty, np.empty((0, 5)), comparison.settings(step))
    assert comparison.difference() < 1e-12


def test_numbers_that_are_not_finite_stay_so():
    table = Table(TableSettings(dim=2, dtype="float64"))
    ids, ones = np.array([1, 2, 3]), np.ones(3, np.int64)
    gradients = np.array([[np.nan, 1], [np.inf, 1], [1, 1]])
    table.push(ids, ones, gradients, AdagradSettings(lr=0.1))
    rows = table.pull(ids)
    assert np.isnan(rows[:2, 0]).all()
    assert np.isfinite(rows[:, 1]).all()
    assert np.isfinite(rows[2]).all()


def test_contents_of_another_dim_or_optimizer_are_refused():
    table = Table(TableSettings(dim=2))
    table.push(np.array([1]), np.array([1]), np.ones((1, 2), np.float32), AdagradSettings(lr=0.1))
    other = Table(TableSettings(dim=3))
    with pytest.raises(TableError, match=r"rows of 6 elements: 3 values, 1 states"):
        other.restore(table.contents())
    assert other.statistics().rows == 0
    unknown = table.contents().__class__(**{**vars(table.contents()), "optimizer": "Lion"})
    with pytest.raises(TableError, match="found:    Lion"):
        Table(TableSettings(dim=2)).restore(unknown)

"""FTRL makes the steps of the paper's rule, written in NumPy, with dense and sparse gradients and in tables."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from rankless.errors import ConfigError
from rankless.parameter_server import FTRL, Constant, Embedding

SETTINGS = {
    "plain": {},
    "regularized": {"l1": 0.5, "l2": 0.3, "beta": 1.0},
    "from_zero": {"initial_accumulator_value": 0.0, "l1": 0.01},
    "other_power": {"lr_power": -0.3, "l2": 0.1},
    "no_power": {"lr_power": 0.0, "l1": 0.02},
}
ROWS, DIM = 9, 3


class RuleOfThePaper:
    """McMahan and others, KDD 2013, algorithm 1, with a power of the squares' sum, element by element."""

    def __init__(self, rows, *, lr_power=-0.5, initial_accumulator_value=0.1, l1=0.0, l2=0.0, beta=0.0):
        self.rows = rows.copy()
        self.squares, self.linear = np.full_like(rows, initial_accumulator_value), np.zeros_like(rows)
        self.power, self.l1, self.l2, self.beta = -lr_power, l1, l2, beta

    def step(self, row, gradient, rate):
        for column, slope in enumerate(gradient):
            place = row, column
            old = self.squares[place]
            new = old + slope**2
            sigma = (new**self.power - old**self.power) / rate
            self.linear[place] += slope - sigma * self.rows[place]
            self.squares[place] = new
            rest = self.linear[place]
            if abs(rest) <= self.l1:
                self.rows[place] = 0.0
            else:
                scale = (self.beta + new**self.power) / rate + self.l2
                self.rows[place] = -(rest - np.sign(rest) * self.l1) / scale


def make_embedding(rows):
    return nn.Embedding.from_pretrained(torch.from_numpy(rows.copy()), freeze=False, sparse=True)


def random_steps(count=30):
    generator = np.random.default_rng(4)
    for step in range(count):
        ids = generator.integers(0, ROWS, 6)
        yield ids, generator.normal(size=(6, DIM)), 0.1 + 0.05 * np.sin(step)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("sparse", [True, False])
def test_ftrl_makes_the_steps_of_the_paper(name, sparse):
    rows = np.random.default_rng(3).normal(size=(ROWS, DIM))
    rule, embedding = RuleOfThePaper(rows, **SETTINGS[name]), make_embedding(rows)
    embedding.sparse = sparse
    optimizer = FTRL(embedding.parameters(), lr=0.1, **SETTINGS[name])
    zeros = 0
    for ids, weights, rate in random_steps():
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        (embedding(torch.from_numpy(ids)) * torch.from_numpy(weights)).sum().backward()
        optimizer.step()
        sums = np.zeros((ROWS, DIM))
        np.add.at(sums, ids, weights)
        for row in np.unique(ids) if sparse else range(ROWS):
            rule.step(row, sums[row], rate)
        np.testing.assert_allclose(embedding.weight.detach().numpy(), rule.rows, rtol=0, atol=1e-10)
        zeros += int((rule.rows == 0).sum())
    assert zeros > 0 or name != "regularized"


@pytest.mark.parametrize("name", SETTINGS)
def test_a_table_with_ftrl_makes_the_steps_of_the_paper(name):
    rule = RuleOfThePaper(np.full((ROWS, DIM), 0.5), **SETTINGS[name])
    table = Embedding(DIM, initial=Constant(value=0.5), dtype=torch.float64)
    optimizer = FTRL(table.parameters(), lr=0.1, **SETTINGS[name])
    for ids, weights, rate in random_steps():
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        (table(torch.from_numpy(ids)) * torch.from_numpy(weights)).sum().backward()
        optimizer.step()
        sums = np.zeros((ROWS, DIM))
        np.add.at(sums, ids, weights)
        for row in np.unique(ids):
            rule.step(row, sums[row], rate)
    with torch.no_grad():
        found = table(torch.arange(ROWS)).numpy()
    np.testing.assert_allclose(found, rule.rows, rtol=0, atol=1e-10)


def test_ftrl_goes_on_from_its_state_dict():
    rows = np.random.default_rng(3).normal(size=(ROWS, DIM))
    whole, first, second = make_embedding(rows), make_embedding(rows), make_embedding(rows)
    optimizers = [FTRL(each.parameters(), lr=0.1, l1=0.02) for each in (whole, first, second)]
    for step, (ids, weights, _) in enumerate(random_steps(10)):
        if step == 5:
            second.load_state_dict(first.state_dict())
            optimizers[2].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
        other = (first, optimizers[1]) if step < 5 else (second, optimizers[2])
        for embedding, optimizer in ((whole, optimizers[0]), other):
            optimizer.zero_grad()
            (embedding(torch.from_numpy(ids)) * torch.from_numpy(weights)).sum().backward()
            optimizer.step()
    assert torch.equal(whole.weight, second.weight)


def test_gradients_too_small_to_count_leave_finite_numbers():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = FTRL([parameter], lr=0.1, initial_accumulator_value=0.0)
    parameter.grad = torch.full((3,), 1e-30)
    optimizer.step()
    assert torch.equal(parameter.detach(), torch.zeros(3))


@pytest.mark.parametrize(
    "settings",
    [
        *({"lr": rate} for rate in (0.0, -1.0, float("nan"))),
        {"lr_power": 0.5},
        *({name: -0.1} for name in ("l1", "l2", "beta", "initial_accumulator_value")),
        {"l1": float("inf")},
    ],
)
def test_settings_of_ftrl_out_of_range_are_refused(settings):
    with pytest.raises(ConfigError, match="FTRL"):
        FTRL([nn.Parameter(torch.ones(2))], **settings)

"""Programs captured for sizes that vary, run at other sizes than they were captured at, against one device.

This is the proof of the scheme: a number that had slipped into a program in place of a size would show here.
"""

import random

import pytest
import torch
from simulated_ranks import OtherProgram, assert_same_as_plain
from test_operators import CASES, weighted
from test_random_programs import STEPS
from torch import nn

NARROW = {
    "view that mixes",
    "split",
    "split by sizes",
    "pixel shuffle of the batch as channels",
    "index of rows and columns",
}
"""Cases that compute something else for another number of rows, and so need another program."""


def sampled(names):
    return [pytest.param(name, marks=[] if place % 4 == 0 else [pytest.mark.exhaustive]) for place, name in names]


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    yield
    torch.set_default_dtype(torch.float32)


def proved(name, captured_at, rows, ranks):
    case = CASES[name]
    model = nn.Module()
    model.factor = nn.Parameter(torch.rand(case.shape) + 0.5)
    assert_same_as_plain(
        lambda x: weighted(case.function(x * model.factor)),
        {"model": model},
        [torch.randn(rows, *case.shape)],
        ranks,
        captured_at=[torch.randn(captured_at, *case.shape)],
    )


@pytest.mark.parametrize("name", sampled(enumerate(name for name in CASES if name not in NARROW)))
@pytest.mark.parametrize(
    ("more", "ranks"), [(2, 3), *(pytest.param(*item, marks=pytest.mark.exhaustive) for item in ((4, 2), (1, 4)))]
)
def test_an_operator_captured_at_one_number_of_rows_is_right_at_another(name, more, ranks):
    rows = CASES[name].rows
    proved(name, rows, rows + more, ranks)
    proved(name, rows + more, rows, ranks)


@pytest.mark.parametrize("name", sorted(NARROW - {"split by sizes"}))
def test_an_operator_that_depends_on_the_number_of_rows_has_a_guard_that_says_so(name):
    rows = CASES[name].rows
    with pytest.raises(OtherProgram):
        proved(name, rows, rows + 2, 3)


@pytest.mark.parametrize("seed", sampled(enumerate(range(48))))
def test_a_random_program_captured_at_one_shape_is_right_at_another_or_has_a_guard(seed):
    choices = random.Random(seed)
    names = [choices.choice(list(STEPS)) for _ in range(choices.randint(2, 6))]
    rows, columns, ranks = choices.randint(4, 9), choices.choice([3, 4, 6]), choices.choice([2, 3])
    model = nn.Linear(columns, columns)

    def loss(x):
        values = [model(x)]
        for place, name in enumerate(names):
            values.append(STEPS[name](values[-1], values[place // 2]).tanh())
        weights = torch.sin(torch.arange(1.0, values[-1].numel() + 1)).view(values[-1].shape)
        return (values[-1] * weights).sum() + values[0].square().mean(), values[-1]

    fitted = 0
    for other in (rows + 1, rows + 2, rows + 3, rows * 2):
        try:
            assert_same_as_plain(
                loss, {"model": model}, [torch.randn(other, columns)], ranks, captured_at=[torch.randn(rows, columns)]
            )
            fitted += 1
        except OtherProgram:
            continue
        break

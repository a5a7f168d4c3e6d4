"""Programs captured for symbolic sizes run correctly at other sizes than those of the capture.

One device is the reference. A number that entered a program in place of a size would show here.
"""

import random

import pytest
import torch
from operator_cases import weighted
from simulated_ranks import GuardsFailed, assert_same_as_plain
from test_operators import CASES
from test_random_programs import OPERATORS
from torch import nn

from rankless.errors import CaptureError
from rankless.torch_versions import find_torch_version

SIZE_DEPENDENT = {
    "view that mixes",
    "split",
    "split by sizes",
    "index of rows and columns",
    "convolution over split channels",
    "convolution with a split weight",
    "CTC",
    "native channel shuffle",
    "fractional pooling",
    "fractional pooling in space",
}
"""Cases that compute something else for another number of rows, and so need another program."""
NO_SYMBOLIC_SIZES = {
    "affine grid",
    "antialiased resizing",
    "tangent in another layout than its value",
    "gradient of a gamma draw",
    "pixel shuffle of the batch as channels",
}
"""Cases whose operators PyTorch cannot trace with symbolic sizes. A job captures them for each number of rows."""
if find_torch_version().startswith("2.15"):
    NO_SYMBOLIC_SIZES -= {"tangent in another layout than its value"}


def mark_most_exhaustive(names):
    return [pytest.param(name, marks=[] if place % 4 == 0 else [pytest.mark.exhaustive]) for place, name in names]


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    yield
    torch.set_default_dtype(torch.float32)


def check_case(name, captured_at, rows, ranks):
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


@pytest.mark.ci_sample(2)
@pytest.mark.parametrize(
    "name", mark_most_exhaustive(enumerate(name for name in CASES if name not in SIZE_DEPENDENT | NO_SYMBOLIC_SIZES))
)
@pytest.mark.parametrize(
    ("more", "ranks"), [(2, 3), *(pytest.param(*item, marks=pytest.mark.exhaustive) for item in ((4, 2), (1, 4)))]
)
def test_an_operator_captured_at_one_number_of_rows_is_exact_at_another(name, more, ranks):
    rows = CASES[name].rows
    check_case(name, rows, rows + more, ranks)
    check_case(name, rows + more, rows, ranks)


@pytest.mark.parametrize("name", sorted(SIZE_DEPENDENT - {"split by sizes"}))
@pytest.mark.ci_sample(3)
def test_an_operator_that_depends_on_the_number_of_rows_has_a_guard_on_it(name):
    rows = CASES[name].rows
    with pytest.raises(GuardsFailed):
        check_case(name, rows, rows + 2, 3)


@pytest.mark.parametrize("name", sorted(NO_SYMBOLIC_SIZES))
@pytest.mark.ci_sample(2)
def test_an_operator_without_symbolic_sizes_fails_at_its_capture(name):
    # The program cache then captures for fixed sizes.
    rows = CASES[name].rows
    with pytest.raises((CaptureError, RuntimeError)) as raised:
        check_case(name, rows, rows + 2, 3)
    assert any(entry.name == "capture" for entry in raised.traceback)


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("seed", mark_most_exhaustive(enumerate(range(48))))
def test_a_random_program_is_exact_at_another_shape_or_has_a_guard(seed):
    choices = random.Random(seed)
    names = [choices.choice(list(OPERATORS)) for _ in range(choices.randint(2, 6))]
    rows, columns, ranks = choices.randint(4, 9), choices.choice([3, 4, 6]), choices.choice([2, 3])
    model = nn.Linear(columns, columns)

    def loss(x):
        values = [model(x)]
        for place, name in enumerate(names):
            values.append(OPERATORS[name](values[-1], values[place // 2]).tanh())
        weights = torch.sin(torch.arange(1.0, values[-1].numel() + 1)).view(values[-1].shape)
        return (values[-1] * weights).sum() + values[0].square().mean(), values[-1]

    succeeded = 0
    for other in (rows + 1, rows + 2, rows + 3, rows * 2):
        try:
            assert_same_as_plain(
                loss, {"model": model}, [torch.randn(other, columns)], ranks, captured_at=[torch.randn(rows, columns)]
            )
            succeeded += 1
        except GuardsFailed:
            continue
        break

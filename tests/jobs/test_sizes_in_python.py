"""Jobs whose Python code needs the number of a size: right for every shape, with a warning about the cost."""

import functools
import math

import numpy
import pytest
import torch
from exactness import Scenario, Script, Step, assert_exact
from support.processes import on_mesh
from test_variable_shapes import count_captures
from torch import nn

from rankless.user_code import display_name

LENGTHS = (6, 9, 4, 7, 9, 5, 6, 8, 4)


def batch(rows):
    length = LENGTHS[int(torch.randint(len(LENGTHS), ()))]
    return (torch.randn(rows, length, 3),)


def make_script(function):
    """Return a script whose job adds `function(model, x)` to its loss."""
    model = nn.Linear(3, 3)

    def loss(x):
        given = function(model, x)
        number, more = given if isinstance(given, tuple) else (given, None)
        return (model(x).square() * number).mean(), more

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return Script(modules={"model": model}, steps=[Step(function=loss, optimizer=optimizer)])


def length_by_len():
    return make_script(lambda _, x: (1 / len(x), len(x[0])))


def loop_over_range():
    return make_script(lambda _, x: sum(x[:, step].mean() / (step + 1) for step in range(x.shape[1])))


def branch_on_length():
    return make_script(lambda _, x: x.mean() if x.shape[1] > 6 else x.sum(1).mean())


def size_as_text():
    return make_script(
        lambda _, x: (2.0, f"{x.shape[1]} {x.shape[0]:03d} {x.shape[1] / 2:.2f} {x.shape} %d %s" % x.shape[:2])
    )


def size_as_result():
    return make_script(
        lambda _, x: (x.shape[1] ** 0.5, {"rows": x.shape[0], "half": x.shape[1] / 2, "even": x.size(1) // 2})
    )


def size_in_math():
    return make_script(lambda _, x: (1 / math.sqrt(x.shape[1]), numpy.arange(x.shape[1]).tolist()))


def size_as_index():
    table = [0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0]
    return make_script(lambda _, x: table[x.shape[1]])


def size_as_key():
    tables = {length: length / 3 for length in range(12)}
    return make_script(lambda _, x: tables[x.shape[1]])


def size_of_a_cached_function():
    @functools.cache
    def slope(length):
        return 1.0 / length

    return make_script(lambda _, x: slope(x.shape[1]))


def size_kept_in_the_model():
    def function(model, x):
        model.length = x.shape[1]
        return model.length

    script = make_script(function)
    script.modules["model"].length = 0
    return script


def size_in_a_tensor():
    return make_script(
        lambda _, x: torch.tensor(float(x.shape[1])) + torch.full((), x.shape[0]) + torch.tensor([x.shape[1]])
    )


def tensor_in_an_inner_function():
    def function(_, x):
        def inner():
            return x.mean() / x.shape[1]

        return inner()

    return make_script(function)


def sizes_that_must_be_equal():
    return make_script(lambda _, x: x.mean() * (3 if x.shape[0] == x.shape[1] else 1))


BUILDS = [
    length_by_len,
    loop_over_range,
    branch_on_length,
    size_as_text,
    size_as_result,
    size_in_math,
    size_as_index,
    size_as_key,
    size_of_a_cached_function,
    size_kept_in_the_model,
    size_in_a_tensor,
    tensor_in_an_inner_function,
    sizes_that_must_be_equal,
]
ROWS = (7, 7, 7, 7, 5, 6, 7, 9, 7, 7, 4, 7)


@pytest.mark.ci_sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "symbolic", "what"),
    [
        (loop_over_range, 4, "it needs the number itself, as len() and range() do"),
        (size_as_key, 1, "unhashable type"),
        (size_kept_in_the_model, 1, "model.length was a SymInt and is a SymInt after the job"),
        (branch_on_length, 3, None),
        (size_as_result, 2, None),
        (tensor_in_an_inner_function, 2, None),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_a_failed_capture_for_varying_sizes_warns_with_the_line(build, symbolic, what):
    torch.manual_seed(0)
    for found, warnings in on_mesh(2, count_captures, build, [batch(rows) for rows in ROWS]):
        assert sum(found) == symbolic, warnings
        if what is None:
            assert warnings == []
        else:
            assert what in warnings[0]
            assert display_name(__file__) in warnings[0]


@pytest.mark.ci_sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.__name__)
@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_python_values_computed_from_sizes_are_right_for_every_shape(build, workers):
    assert_exact(Scenario(build=build, batch=batch, rows=ROWS), workers, torch.float64)

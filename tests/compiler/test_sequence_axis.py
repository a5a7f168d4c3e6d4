"""Positions divided along an axis: every model is the same training, and attention exchanges positions for heads."""

import math
from collections import Counter

import pytest
import torch
from simulated_pipelines import capture_job
from simulated_ranks import assert_runs_as_plain, divide_evenly, run_program_on_axes
from simulated_tensor_axis import InDoublePrecision
from tensor_axis_models import CASES, LENGTH, ROWS, WIDTH, make_decoder

ACTIVATION = ROWS * LENGTH * WIDTH * 8
MESHES = ((2,), (3,), (2, 2))
IMAGES = ("lenet", "batch norm", "group norm", "vit")


def check_sequence_axis(function, modules, arguments, axis_sizes):
    """Run a job whose last axis divides dim 1 of its arguments; axes before it divide the batch."""

    def precise(*given):
        with InDoublePrecision():
            return function(*given)

    program = capture_job(precise, modules, arguments, True)
    last = len(axis_sizes) - 1
    shardings = [
        divide_evenly(
            item.shape, axis_sizes, [(1 if axis == last else 0) if item.dim() > 1 else None for axis in range(last + 1)]
        )
        for item in arguments
    ]
    return assert_runs_as_plain(
        lambda: run_program_on_axes(program, arguments, modules, axis_sizes, shardings, {}),
        precise,
        modules,
        arguments,
    )


@pytest.mark.ci_sample(12)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_model_with_divided_positions_is_the_same_training(name, mesh):
    function, modules, arguments = CASES[name]()
    check_sequence_axis(function, modules, arguments, mesh)


@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)])
@pytest.mark.parametrize("form", ["split", "three", "heads"])
def test_a_decoder_exchanges_positions_for_heads_and_sends_no_other_activation(form, mesh):
    function, modules, arguments = make_decoder(form)
    outcome = check_sequence_axis(function, modules, arguments, mesh)
    size = ACTIVATION // math.prod(mesh[:-1])
    large = [item for item in outcome.local.collectives if item.purpose == "input" and item.bytes >= size]
    # Queries, keys, values and results of two layers; in the backward pass the gradients of the same.
    assert Counter((item.kind, item.backward) for item in large) == {
        ("all_to_all", False): 2 * 4,
        ("all_to_all", True): 2 * 4,
    }

"""Positions divided along an axis: every model is the same training, and attention exchanges positions for heads."""

import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from simulated_pipelines import capture_job
from simulated_ranks import assert_runs_as_plain, divide_evenly, run_program_on_axes
from simulated_tensor_axis import InDoublePrecision
from tensor_axis_models import CASES, LENGTH, ROWS, WIDTH, make_decoder

ACTIVATION = ROWS * LENGTH * WIDTH * 8
MESHES = ((2,), (3,), (2, 2))


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


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_model_with_divided_positions_is_the_same_training(name, mesh):
    function, modules, arguments = CASES[name]()
    check_sequence_axis(function, modules, arguments, mesh)


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)])
@pytest.mark.parametrize("form", ["split", "heads"])
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


def test_attention_by_hand_gathers_keys_and_values():
    function, modules, arguments = make_decoder("three")
    outcome = check_sequence_axis(function, modules, arguments, (2,))
    large = [item for item in outcome.local.collectives if item.purpose == "input" and item.bytes >= ACTIVATION]
    assert Counter((item.kind, item.backward) for item in large) == {
        ("all_gather", False): 2 * 2,
        ("reduce_scatter", True): 2 * 2,
    }


def attend(heads, keys, length, other, is_causal, has_mask):
    """Return a job of attention on its arguments, with `heads` and `keys` heads, and `length` and `other` positions."""
    torch.manual_seed(1)
    model = torch.nn.ModuleList([torch.nn.Linear(8, count * 4, dtype=torch.float64) for count in (heads, keys, keys)])
    model.register_parameter("bias", torch.nn.Parameter(torch.randn(length, other, dtype=torch.float64)))

    def function(x, y):
        query = model[0](x).unflatten(2, (heads, 4)).transpose(1, 2)
        key, value = (layer(y).unflatten(2, (keys, 4)).transpose(1, 2) for layer in list(model)[1:])
        mask = model.bias if has_mask else None
        found = F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, enable_gqa=heads != keys)
        return found.square().mean()

    arguments = [torch.randn(2, size, 8, dtype=torch.float64) for size in (length, other)]
    return function, {"model": model}, arguments


@pytest.mark.ci_sample(4)
@pytest.mark.parametrize(
    ("heads", "keys", "length", "other", "is_causal", "has_mask"),
    [
        (4, 4, 7, 7, True, False),
        (4, 2, 6, 6, True, False),
        (4, 2, 5, 9, False, False),
        (3, 3, 5, 5, False, True),
        (1, 1, 6, 6, False, True),
        (1, 1, 6, 6, True, False),
        (2, 1, 6, 4, False, False),
        (1, 1, 9, 5, False, False),
    ],
)
@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)])
def test_attention_of_any_heads_and_positions_is_right(heads, keys, length, other, is_causal, has_mask, mesh):
    check_sequence_axis(*attend(heads, keys, length, other, is_causal, has_mask), mesh)

"""Experts divided along an axis, with the batch: every mixture is the same training, and no expert is gathered."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from mixture_models import EXPERTS, FORMS, LENGTH, ROWS, WIDTH, make_mixture
from simulated_pipelines import capture_job
from simulated_ranks import assert_runs_as_plain, divide_evenly, run_program_on_axes
from torch import nn

from rankless.compiler.expert_parallel import ExpertDivider
from rankless.compiler.tensor_parallel import DimRequest, TensorDivider, list_parameters
from rankless.parallel.tensor_placement import Shard, split_lengths

MESHES = ((2,), (3,), (4,), (2, 2))


def check_expert_axis(function, modules, arguments, axis_sizes, requests=None, **settings):
    """Run a job whose last axis divides experts; all axes divide the batch. Return the outcome, and what is divided."""
    program = capture_job(function, modules, arguments, True, **settings)
    wanted = {name: DimRequest(dim=dim) for name, dim in (requests or {}).items()}
    states = ExpertDivider(program, axis_sizes[-1], wanted).divide(fills=requests is None)
    dims = [[0 if item.dim() else None for _ in axis_sizes] for item in arguments]
    shardings = [divide_evenly(item.shape, axis_sizes, each) for item, each in zip(arguments, dims, strict=True)]
    outcome = assert_runs_as_plain(
        lambda: run_program_on_axes(program, arguments, modules, axis_sizes, shardings, states),
        function,
        modules,
        arguments,
    )
    return outcome, states


def find_moves(outcome, backward):
    """Return the moves of values as large as all tokens, for operators."""
    large = [item for item in outcome.local.collectives if item.purpose in ("input", "operator")]
    return Counter(item.kind for item in large if item.bytes >= ROWS * LENGTH * WIDTH * 8 and item.backward == backward)


@pytest.mark.ci_sample(2)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_mixture_is_the_same_training_and_its_experts_are_divided(form, mesh):
    function, modules, arguments = make_mixture(form)
    outcome, states = check_expert_axis(function, modules, arguments, mesh)
    stacked = {f"model.{name}" for name, item in modules["model"].named_parameters() if item.dim() == 3}
    assert states == dict.fromkeys(stacked, Shard(0, split_lengths(EXPERTS, mesh[-1])))
    assert not [item for item in outcome.local.collectives if item.value in stacked]


@pytest.mark.ci_sample(2)
@pytest.mark.parametrize("form", FORMS)
def test_a_batch_that_workers_cannot_share_equally(form):
    function, modules, arguments = make_mixture(form, rows=5)
    check_expert_axis(function, modules, arguments, (2,))


@pytest.mark.parametrize("form", ["switch", "groups"])
def test_tokens_move_once_to_their_experts_and_once_back(form):
    function, modules, arguments = make_mixture(form)
    outcome, _ = check_expert_axis(function, modules, arguments, (2,))
    forward, backward = find_moves(outcome, False), find_moves(outcome, True)
    if form == "switch":  # the slots of an expert have tokens of all workers, so what a worker has is a term of a sum
        assert forward == backward == {"reduce_scatter": 1, "all_gather": 1}
    else:
        assert forward == {"all_to_all": 1, "reduce_scatter": 1}
        assert backward["all_to_all"] == 2
        assert backward["all_gather"] == 1


def test_without_the_axis_no_expert_is_divided():
    """Queries and keys are multiplied in batches too, but none of them is a parameter."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(WIDTH, 4, 32, 0.0, batch_first=True) for _ in range(2)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 3)).double()

    def train(inputs, labels):
        return F.cross_entropy(model(inputs).mean(1), labels)

    arguments = [torch.randn(4, 6, WIDTH, dtype=torch.float64), torch.arange(4) % 3]
    program = capture_job(train, {"model": model}, arguments, True)
    assert ExpertDivider(program, 2, {}).divide(fills=True) == {}


def test_features_are_divided_within_experts():
    function, modules, arguments = make_mixture("groups")
    program = capture_job(function, modules, arguments, True)
    experts = ExpertDivider(program, 2, {}).divide(fills=True)
    features = TensorDivider(program, 2, {}, {name: item.dim for name, item in experts.items()}).divide(fills=True)
    assert {name: features[name].dim for name in experts} == {
        "model.mixture.experts_up": 2,
        "model.mixture.experts_down": 1,
    }


def test_a_request_divides_only_what_it_names_and_what_is_linked_with_it():
    function, modules, arguments = make_mixture("switch with few slots")
    _, states = check_expert_axis(function, modules, arguments, (2,), {"model.mixture.experts.up_bias": 0})
    assert set(states) == {f"model.mixture.experts.{name}" for name in ("up", "up_bias", "down")}


@pytest.mark.parametrize("recompute", [0.5, 1.0])
def test_values_can_be_computed_again(recompute):
    function, modules, arguments = make_mixture("groups")
    outcome, _ = check_expert_axis(function, modules, arguments, (2,), recompute=recompute)
    assert outcome.local.recomputed > 0


def test_one_expert_per_product_is_no_mixture():
    """A product with one matrix for all samples, and one with a matrix per sample."""
    torch.manual_seed(0)
    weight, samples = nn.Parameter(torch.randn(1, WIDTH, WIDTH)), nn.Parameter(torch.randn(2, WIDTH, WIDTH))
    model = nn.ParameterList([weight, samples]).double()

    def train(inputs):
        return (inputs @ model[0] @ model[1]).square().mean()

    program = capture_job(train, {"model": model}, [torch.randn(2, 4, WIDTH, dtype=torch.float64)], True)
    assert "0" not in {name.rpartition(".")[2] for name in ExpertDivider(program, 2, {}).divide(fills=True)}
    assert set(list_parameters(program).values()) == {"model.0", "model.1"}

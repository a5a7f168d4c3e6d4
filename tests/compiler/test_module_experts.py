"""Experts that are modules of their own: each is on one rank, and all ranks compute theirs at once."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from mixture_models import EXPERTS, LENGTH, LOOPS, ROWS, WIDTH, Loop, make_expert, make_mixture
from simulated_pipelines import capture_job
from test_expert_axis import MESHES, check_expert_axis
from torch import nn

from rankless.compiler.expert_parallel import ExpertDivider
from rankless.parallel.tensor_placement import find_only_rank, split_lengths

SAMPLES = ROWS * LENGTH * WIDTH * 8
"""The bytes of all samples."""


def find_owners(states):
    """Return the rank of each expert, by the number in the names of its parameters."""
    owners = {}
    for name, placement in states.items():
        number = next(int("".join(filter(str.isdigit, part))) for part in name.split(".") if part[-1].isdigit())
        owners.setdefault(number, set()).add(find_only_rank(placement))
    return {number: ranks.pop() for number, ranks in owners.items() if len(ranks) == 1}


def divide(model, rows=4, ranks=2):
    """Return the parameters that are divided of a model that returns a value for each sample."""
    arguments = [torch.randn(rows, 6, WIDTH, dtype=torch.float64)]
    program = capture_job(lambda x: model(x).square().mean(), {"model": model.double()}, arguments, True)
    return ExpertDivider(program, ranks, {}).divide(fills=True)


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("form", LOOPS)
def test_each_expert_is_on_one_rank_and_the_training_is_the_same(form, mesh):
    function, modules, arguments = make_mixture(form)
    outcome, states = check_expert_axis(function, modules, arguments, mesh)
    count = {"loop with three experts": 3, "loop with five experts": 5}.get(form, EXPERTS)
    if count < mesh[-1]:
        assert states == {}
        return
    ranks = [rank for rank, experts in enumerate(split_lengths(count, mesh[-1])) for _ in range(experts)]
    assert find_owners(states) == dict(enumerate(ranks))
    assert not [item for item in outcome.local.collectives if item.value in states]


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("form", ["loop with dropout", "slots and a loop", "two gates"])
@pytest.mark.parametrize("rows", [1, 5])
def test_a_batch_that_workers_cannot_share_equally(form, rows):
    function, modules, arguments = make_mixture(form, rows=rows)
    check_expert_axis(function, modules, arguments, (2,))


@pytest.mark.parametrize("recompute", [0.5, 1.0])
def test_values_can_be_computed_again(recompute):
    function, modules, arguments = make_mixture("loop")
    outcome, _ = check_expert_axis(function, modules, arguments, (2,), recompute=recompute)
    assert outcome.local.recomputed > 0


@pytest.mark.ci_sample(2)
@pytest.mark.parametrize("form", ["loop", "loop with five experts", "numbered attributes", "lists of parameters"])
def test_samples_go_once_to_all_experts_and_results_come_back_as_one_sum(form):
    function, modules, arguments = make_mixture(form)
    outcome, _ = check_expert_axis(function, modules, arguments, (2,))
    large = [item for item in outcome.local.collectives if item.purpose == "input" and item.bytes >= SAMPLES]
    found = Counter((item.kind, item.backward) for item in large)
    assert found == {
        ("all_gather", False): 1,
        ("reduce_scatter", False): 1,
        ("all_gather", True): 1,
        ("reduce_scatter", True): 1,
    }


def test_slots_go_to_the_experts_of_all_ranks_by_one_exchange():
    function, modules, arguments = make_mixture("slots and a loop")
    outcome, _ = check_expert_axis(function, modules, arguments, (2,))
    exchanges = [item for item in outcome.local.collectives if item.kind == "all_to_all"]
    assert [item.backward for item in exchanges] == [False, True]
    assert not [item for item in outcome.local.collectives if item.kind in ("gather", "scatter", "reduce", "broadcast")]


@pytest.mark.parametrize("form", ["loop", "slots and a loop", "loop with gated experts"])
@pytest.mark.ci_sample(1)
def test_no_rank_waits_for_the_expert_of_another(form):
    """Between the first and the last product of an expert, in each pass, nothing is exchanged."""
    function, modules, arguments = make_mixture(form)
    outcome, _ = check_expert_axis(function, modules, arguments, (2,))
    for backward in (False, True):
        nodes = [node for node in outcome.local.graph.nodes if bool(node.meta.get("backward")) == backward]
        products = [
            place
            for place, node in enumerate(nodes)
            if ".experts." in str(node.meta.get("module")) and "linear" in str(node.target)
        ]
        assert len(products) >= 4
        between = nodes[products[0] : products[-1]]
        assert not [node for node in between if "collective" in node.meta]


def test_layers_one_after_another_are_no_experts():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4)))
    assert divide(model) == {}


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([make_expert() for _ in range(4)])

    def forward(self, x):
        total = x
        for block in self.blocks:
            x = x + block(x)
            total = total + x
        return total


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, 4) for _ in range(3))

    def forward(self, x):
        weights = (self.query(x) @ self.key(x).mT).softmax(-1)
        return weights @ self.value(x)


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList([Head() for _ in range(4)])

    def forward(self, x):
        return torch.cat([head(x) for head in self.heads], -1)


class Fused(nn.Module):
    """The weights of all modules in one tensor, with which all samples are multiplied."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(WIDTH, 4) for _ in range(4)])

    def forward(self, x):
        return F.linear(x, torch.cat([part.weight for part in self.parts]))


class Losses(nn.Module):
    """Towers for several tasks, of which only the losses are added."""

    def __init__(self):
        super().__init__()
        self.towers = nn.ModuleList([nn.Linear(WIDTH, 1) for _ in range(4)])

    def forward(self, x):
        return sum(tower(x).square().mean() for tower in self.towers)


class Different(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([make_expert(hidden) for hidden in (8, 12, 16, 20)])

    def forward(self, x):
        return sum(part(x) for part in self.parts)


@pytest.mark.parametrize("make", [Residual, Heads, Fused, Losses, Different])
@pytest.mark.ci_sample(2)
def test_modules_that_are_no_experts(make):
    assert divide(make()) == {}


class Twice(nn.Module):
    """The same experts for two inputs, one after another."""

    def __init__(self):
        super().__init__()
        self.mixture = Loop()

    def forward(self, x):
        return self.mixture(self.mixture(x)[0])[0]


def test_experts_that_compute_from_each_others_results_are_no_experts():
    assert divide(Twice()) == {}


class Nested(nn.Module):
    """Experts whose layers are numbered too, in layers that are numbered."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Loop(3), Loop(3, make=lambda: nn.Sequential(make_expert(), make_expert()))])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)[0]
        return x


def test_each_layer_has_experts_of_its_own():
    model = Nested()
    states = divide(model, ranks=3)
    experts = {name for name, _ in model.named_parameters() if ".experts." in name}
    assert {name.removeprefix("model.") for name in states} == experts
    for name, placement in states.items():
        assert find_only_rank(placement) == int(name.split(".experts.")[1].split(".")[0]), name


class Frozen(Loop):
    def __init__(self):
        super().__init__()
        self.experts[1].requires_grad_(False)
        self.unused = nn.ModuleList([nn.Linear(3, 3) for _ in range(4)])


def test_frozen_experts_are_divided_too_and_unused_modules_are_not():
    model = Frozen()
    states = divide(nn.Sequential(Pick(model)))
    assert {int(name.split(".experts.")[1][0]) for name in states} == {0, 1, 2, 3}


class Pick(nn.Module):
    def __init__(self, mixture):
        super().__init__()
        self.mixture = mixture

    def forward(self, x):
        return self.mixture(x)[0]

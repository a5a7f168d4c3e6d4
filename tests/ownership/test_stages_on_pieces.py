"""What a stage of a pipeline gathers if workers hold its parameters in pieces: each parameter once in a step."""

import weakref
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from support.grid_jobs import float64_by_default, make_grid_job
from support.processes import on_mesh
from torch import nn

from rankless.compiler.scheduling.parameter_gathers import GatherOfParameters
from rankless.context.world import RunSettings
from rankless.parallel.mesh import Mesh
from rankless.parallel.user_plan import Plan

GRID = {"pipeline": 2, "data": 2}
WIDTH = 512
"""A matrix has 1 MiB, the smallest group."""
LAYERS = 8


class Programs:
    """Keeps the collectives of a job's programs."""

    def __init__(self):
        self.collectives = []

    def record(self, _job, local):
        moves = [item for item in local.collectives if item.kind in ("all_gather", "reduce_scatter")]
        self.collectives.append([(item.kind, item.value, item.bytes) for item in moves])

    def run(self, _job, bound, values, sizes):
        return bound.local(values, sizes)

    def finish(self, _known):
        pass


def make_model(tied):
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    if tied:
        model[-1].weight = model[0].weight
    return model


def train_in_stages(mesh, schedule, microbatches, autocast=False, tied=False):
    """Return the moves of the program of this worker, and how many gathered matrices lived at once at most."""
    torch.manual_seed(0)
    model, programs = make_model(tied), Programs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(x):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(x).square().mean()

    plan = Plan(schedule=schedule, microbatches=microbatches)
    settings = RunSettings(programs=programs)
    train, _ = make_grid_job(loss, model, optimizer, mesh, GRID, plan, zero="parameters", settings=settings)
    made, most, finish = [], 0, GatherOfParameters.finish

    def note(gather, started):
        nonlocal most
        wholes = finish(gather, started)
        made.extend(map(weakref.ref, wholes))
        most = max(most, len([item for item in made if item() is not None]))
        return wholes

    GatherOfParameters.finish = note
    try:
        for _ in range(2):
            train(torch.ones(8, WIDTH))
        assert not [item for item in made if item() is not None], "a gathered parameter outlives the step"
    finally:
        GatherOfParameters.finish = finish
    (collectives,) = programs.collectives
    return collectives, most


@pytest.mark.parametrize(
    ("schedule", "microbatches"), [("1f1b", 1), ("1f1b", 4), ("gpipe", 3), ("interleaved", 4), ("zero-bubble", 4)]
)
@pytest.mark.ci_sample(2)
def test_a_stage_gathers_and_scatters_each_parameter_once(schedule, microbatches):
    for collectives, _ in on_mesh(4, train_in_stages, schedule, microbatches):
        assert Counter(kind for kind, _, _ in collectives) == {"all_gather": LAYERS // 2, "reduce_scatter": LAYERS // 2}
        assert {size for _, _, size in collectives} == {WIDTH * WIDTH * 4}


def test_a_parameter_of_two_stages_is_gathered_by_the_first_only():
    found = on_mesh(4, train_in_stages, "1f1b", 4, False, True)
    gathered = [sorted(value for kind, value, _ in moves if kind == "all_gather") for moves, _ in found]
    assert gathered[0] == gathered[1]
    assert gathered[2] == gathered[3]
    assert sorted(gathered[0] + gathered[2]) == [f"model.{number}.weight" for number in range(LAYERS - 1)]


def test_a_parameter_that_is_only_cast_is_freed_after_its_cast():
    kept, cast = (on_mesh(4, train_in_stages, "1f1b", 4, autocast)[0][1] for autocast in (False, True))
    assert kept == LAYERS // 2
    assert cast <= 2


class Viewed(nn.Module):
    """Parameters of which a stage takes views, casts and copies; the first one is used by the last stage too."""

    def __init__(self):
        super().__init__()
        self.first, self.token = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6))
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        x = x @ self.first.t().tanh() + (self.token.view(1, 6) * 2).expand(x.shape)
        for layer in self.layers:
            x = torch.tanh(layer(x)) @ layer.weight.t().contiguous()
        return x @ self.first.t()


def train_viewed(mesh, zero):
    with float64_by_default():
        torch.manual_seed(0)
        model, inputs, labels = Viewed(), torch.randn(9, 6), torch.arange(9) % 6
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train, _ = make_grid_job(lambda x, y: F.cross_entropy(model(x), y), model, optimizer, mesh, GRID, zero=zero)
        losses = [train(inputs, labels) for _ in range(3)]
        return torch.cat([torch.stack(losses), *[item.detach().flatten() for item in model.parameters()]])


def test_views_and_copies_of_gathered_parameters_are_those_of_one_device():
    wanted = train_viewed(Mesh.solo(), None)
    for found in on_mesh(4, train_viewed, "parameters"):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)

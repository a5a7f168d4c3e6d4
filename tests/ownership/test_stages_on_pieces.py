"""What a stage of a pipeline gathers if workers hold its parameters in pieces: each parameter once in a step."""

import weakref
from collections import Counter

import pytest
import torch
from support.grids import make_grid
from support.processes import on_mesh
from torch import nn

from rankless.compiler.scheduling.parameter_gathers import GatherOfParameters
from rankless.context.world import World
from rankless.jobs.definition import StepOptions
from rankless.jobs.job import make_job
from rankless.parallel.plan import Plan

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
    grid = make_grid(mesh, pipeline=2, data=2)
    world = World(mesh=grid, notify=lambda _: None, send_record=lambda _: None, programs=programs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(x):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(x).square().mean()

    train = make_job(
        loss,
        model=model,
        optimizer=optimizer,
        view=None,
        world=lambda: world,
        step_options=StepOptions(zero="parameters"),
    )
    train.configure({}, plan=Plan(schedule=schedule, microbatches=microbatches))
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

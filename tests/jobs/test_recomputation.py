"""Trainings that compute values again return what plain PyTorch returns, to 1e-12 in float64."""

import checkpointed_cases
import pytest
import recomputed_cases
import torch
from support.processes import on_mesh
from support.training_runs import require_equal, run_in_float64
from support.trainings import CASES as TRAININGS

from rankless.context.world import World
from rankless.errors import ConfigError
from rankless.jobs.job import make_job
from rankless.jobs.job_definition import StepOptions
from rankless.parallel.mesh import Mesh

OWN = {**recomputed_cases.CASES, **checkpointed_cases.CASES}
CASES = {**TRAININGS, **OWN}


def run_case(mesh, name, recompute, zero=None):
    """Return what a case returns on this worker."""

    def build(world, function, model, optimizer, options):
        options = StepOptions(**options, zero=None if optimizer is None else zero)
        job = make_job(function, model=model, optimizer=optimizer, view=None, world=lambda: world, step_options=options)
        return job if optimizer is None else job.configure({}, recompute=recompute)

    return run_in_float64(CASES[name], mesh, build)


def list_parameters():
    """Return all cases with all blocks computed again; those of other tests are left to the soak."""
    for name in CASES:
        yield pytest.param(name, marks=() if name in OWN else pytest.mark.exhaustive)


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("name", list(list_parameters()))
def test_a_training_that_computes_blocks_again_equals_one_device(name):
    wanted = run_case(Mesh.solo(), name, None)
    for found in on_mesh(2, run_case, name, "blocks"):
        require_equal(found, wanted)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("workers", "recompute", "zero"), [(3, 0.4, None), (2, "blocks", "parameters"), (2, None, None)]
)
@pytest.mark.parametrize("name", CASES)
def test_with_other_settings_too(name, workers, recompute, zero):
    wanted = run_case(Mesh.solo(), name, None)
    for found in on_mesh(workers, run_case, name, recompute, zero):
        require_equal(found, wanted)


ON_ONE_DEVICE = ("blocks_in_a_list", "noise_in_blocks", "batch_norm_in_blocks", "calls_accumulated", "lengths_vary")


@pytest.mark.ci_sample(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ON_ONE_DEVICE else pytest.mark.exhaustive) for name in CASES]
)
def test_a_training_on_one_device_computes_blocks_again_too(name):
    require_equal(run_case(Mesh.solo(), name, "blocks"), run_case(Mesh.solo(), name, None))


def make_job_of(recompute, view="consistent", trains=True):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if trains else None
    world = World(mesh=Mesh.solo(), notify=lambda _: None, send_record=lambda _: None)
    made = make_job(
        lambda x: model(x).mean(),
        model=model,
        optimizer=optimizer,
        view=view,
        world=lambda: world,
    )
    return made.configure({}, recompute=recompute)


@pytest.mark.parametrize("recompute", ["block", "all", 0, 0.0, -0.5, 1.01, float("nan"), True, [0.5]])
def test_other_values_are_refused(recompute):
    with pytest.raises(ConfigError, match="a fraction above 0 and at most 1"):
        make_job_of(recompute)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"view": "mirrored"}, "in the mirrored view"),
        ({"view": "whole"}, "with capture=False"),
        ({"trains": False}, "without optimizer="),
    ],
)
def test_jobs_without_a_program_or_gradients_are_refused(settings, found):
    with pytest.raises(ConfigError, match=found):
        make_job_of("blocks", **settings)

"""Trainings with divided states return what they return on one device."""

import pytest
from divided_accesses import ACCESSES
from support.processes import on_mesh
from support.training_runs import require_equal, run_in_float64
from support.trainings import CASES

from rankless.jobs.job import make_job
from rankless.jobs.job_definition import StepOptions
from rankless.parallel.mesh import Mesh
from rankless.records.parallel_plan import ZERO_LEVELS

ALL = {**CASES, **ACCESSES}
WITH_EVERY_LEVEL = (
    "fused_channels_last",
    "clipped_by_norm",
    "accumulated_calls",
    "tied_weights",
    "average_in_the_job",
    "saved_and_loaded",
    "small_parameters",
    "adafactor",
)


def run_case(mesh, name, zero):
    """Return what a case returns on this worker."""

    def build(world, function, model, optimizer, options):
        step_options = StepOptions(**options, zero=None if optimizer is None else zero)
        return make_job(
            function, model=model, optimizer=optimizer, view=None, world=lambda: world, step_options=step_options
        )

    return run_in_float64(ALL[name], mesh, build)


def check(name, zero, workers):
    wanted = run_case(Mesh.solo(), name, zero)
    for found in on_mesh(workers, run_case, name, zero):
        require_equal(found, wanted)


def list_parameters():
    """Return all cases with each level; CI leaves out most of those with whole parameters."""
    for name in ALL:
        for zero in ZERO_LEVELS:
            marks = () if zero == "parameters" or name in WITH_EVERY_LEVEL else pytest.mark.exhaustive
            yield pytest.param(name, zero, marks=marks)


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize(("name", "zero"), list(list_parameters()))
def test_a_training_with_divided_states_equals_one_device(name, zero):
    check(name, zero, 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [3, 4])
@pytest.mark.parametrize("zero", ZERO_LEVELS)
@pytest.mark.parametrize("name", ALL)
def test_on_more_workers_too(name, zero, workers):
    check(name, zero, workers)

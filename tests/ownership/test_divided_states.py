"""Trainings with divided states return what they return on one device."""

import pytest
import torch
from divided_accesses import ACCESSES
from support.processes import on_mesh
from support.trainings import CASES

from rankless.context.world import World
from rankless.jobs.definition import StepOptions
from rankless.jobs.job import make_job
from rankless.parallel.mesh import Mesh
from rankless.records.parallel_plan import ZERO_LEVELS

BOUND = 1e-12
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
    """Return what a case returns on this worker, and the share of its parameters that this worker holds."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(3)
        world = World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None)

        def make(function, model, optimizer, **options):
            options = StepOptions(**options, zero=None if optimizer is None else zero)
            return make_job(
                function, model=model, optimizer=optimizer, view=None, world=lambda: world, step_options=options
            )

        return [value.detach().clone() for value in ALL[name](make)]
    finally:
        torch.set_default_dtype(before)


def check(name, zero, workers):
    wanted = run_case(Mesh.solo(), name, zero)
    for found in on_mesh(workers, run_case, name, zero):
        assert len(found) == len(wanted)
        for place, (ours, plain) in enumerate(zip(found, wanted, strict=True)):
            assert ours.shape == plain.shape, place
            assert ours.dtype == plain.dtype, place
            off = float((ours - plain).abs().max()) / max(1.0, float(plain.abs().max()))
            assert off <= BOUND, f"value {place} is off by {off:.3g}"


def list_parameters():
    """Return all cases with each level; CI leaves out most of those with whole parameters."""
    for name in ALL:
        for zero in ZERO_LEVELS:
            marks = () if zero == "parameters" or name in WITH_EVERY_LEVEL else pytest.mark.exhaustive
            yield pytest.param(name, zero, marks=marks)


@pytest.mark.parametrize(("name", "zero"), list(list_parameters()))
def test_a_training_with_divided_states_equals_one_device(name, zero):
    check(name, zero, 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [3, 4])
@pytest.mark.parametrize("zero", ZERO_LEVELS)
@pytest.mark.parametrize("name", ALL)
def test_on_more_workers_too(name, zero, workers):
    check(name, zero, workers)

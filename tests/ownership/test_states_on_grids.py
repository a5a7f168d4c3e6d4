"""Trainings whose states two or three axes divide return what they return on one device."""

import math

import pytest
from divided_accesses import ACCESSES
from support.grids import make_grid
from support.processes import on_mesh
from support.training_runs import require_equal, run_in_float64
from support.trainings import CASES

from rankless.jobs.job import make_job
from rankless.jobs.job_definition import StepOptions
from rankless.parallel.mesh import Mesh

ALL = {**CASES, **ACCESSES}
GRIDS = [
    ({"tensor": 2}, None),
    ({"pipeline": 2}, None),
    ({"data": 2, "tensor": 2}, None),
    ({"data": 2, "tensor": 2}, "optimizer"),
    ({"data": 2, "tensor": 2}, "gradients"),
    ({"data": 2, "tensor": 2}, "parameters"),
    ({"pipeline": 2, "tensor": 2}, None),
    ({"pipeline": 2, "data": 2}, "optimizer"),
    ({"pipeline": 2, "data": 2}, "gradients"),
    ({"pipeline": 2, "data": 2}, "parameters"),
    ({"pipeline": 2, "data": 2, "tensor": 2}, "gradients"),
    ({"pipeline": 2, "data": 2, "tensor": 2}, "parameters"),
]
WITHOUT_PIPELINE = ("fused_channels_last", "average_in_the_job", "weights_clipped_in_the_job")
"""Batch norm needs the whole batch, and a single layer has no second stage: `tests/jobs` has their errors."""
IN_CI = {
    "clipped_by_norm": [({"data": 2, "tensor": 2}, "parameters"), ({"pipeline": 2, "data": 2}, "parameters")],
    "saved_and_loaded": [({"data": 2, "tensor": 2}, "optimizer"), ({"pipeline": 2, "data": 2}, "gradients")],
    "weights_changed_through_views": [({"data": 2, "tensor": 2}, "parameters")],
    "accumulated_calls": [({"pipeline": 2, "data": 2}, "optimizer")],
    "tied_weights": [({"pipeline": 2, "data": 2}, "parameters")],
}


def run_case(mesh, name, sizes, zero):
    """Return what a case returns on this worker."""

    def build(world, function, model, optimizer, options):
        step_options = StepOptions(**options, zero=None if optimizer is None else zero)
        return make_job(
            function, model=model, optimizer=optimizer, view=None, world=lambda: world, step_options=step_options
        )

    return run_in_float64(ALL[name], make_grid(mesh, **sizes) if mesh.size > 1 else mesh, build)


def list_parameters():
    """Return all cases with each mesh; CI has a few of them."""
    for name in ALL:
        for sizes, zero in GRIDS:
            if name in WITHOUT_PIPELINE and "pipeline" in sizes:
                continue
            marks = () if (sizes, zero) in IN_CI.get(name, ()) else pytest.mark.exhaustive
            yield pytest.param(name, sizes, zero, marks=marks, id=f"{name}-{'-'.join(sizes)}-{zero}")


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize(("name", "sizes", "zero"), list(list_parameters()))
def test_a_training_on_a_grid_equals_one_device(name, sizes, zero):
    wanted = run_case(Mesh.solo(), name, {}, None)
    for found in on_mesh(math.prod(sizes.values()), run_case, name, sizes, zero):
        require_equal(found, wanted)

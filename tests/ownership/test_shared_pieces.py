"""Trainings whose workers hold the pieces of parameters in one memory return what they return on one device."""

import pytest
from collectives.backends.shared_groups import in_shared_memory
from divided_accesses import ACCESSES
from shared_piece_cases import SHARED_CASES
from support.processes import on_mesh
from support.training_runs import require_equal, run_in_float64
from support.trainings import CASES

from rankless.jobs.job import make_job
from rankless.jobs.job_definition import StepOptions
from rankless.parallel.mesh import Mesh

ALL = {**CASES, **ACCESSES, **SHARED_CASES}


def run_case(mesh, name, recompute=None):
    """Return what a case returns on this worker, and how many of its jobs' parameters are in shared memory."""
    jobs = []

    def build(world, function, model, optimizer, options):
        step_options = StepOptions(**options, zero=None if optimizer is None else "parameters")
        job = make_job(
            function, model=model, optimizer=optimizer, view=None, world=lambda: world, step_options=step_options
        )
        jobs.append(job)
        return job if optimizer is None else job.configure({}, recompute=recompute)

    found = run_in_float64(ALL[name], mesh, build)
    return found, sum(
        job.owner.find_shared_memory(item) is not None for job in jobs for item in job.definition.parameters()
    )


def check(name, workers, recompute=None):
    wanted, _ = run_case(Mesh.solo(), name)
    for found, shared in on_mesh(workers, in_shared_memory, run_case, name, recompute):
        # Three workers divide some small parameters along columns, which are no range of memory.
        assert shared > 0 or workers == 3
        require_equal(found, wanted)


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("name", ALL)
def test_a_training_with_pieces_in_shared_memory_equals_one_device(name):
    check(name, 2)


@pytest.mark.ci_sample(2)
@pytest.mark.parametrize("name", ALL)
def test_on_three_workers_whose_pieces_differ_in_length(name):
    check(name, 3)


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("name", ALL)
def test_blocks_that_are_computed_again_read_shared_memory(name):
    check(name, 2, "blocks")

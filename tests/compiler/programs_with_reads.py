"""Run the programs of a job until one read the values that it was captured for, as jobs do."""

import torch
from simulated_pipelines import DEVICE, capture_job

from rankless.compiler.capture.capture import ArgumentShape, JobSource, capture
from rankless.compiler.capture.value_reads import ValueNeeded, ValueReads
from rankless.compiler.lowering.value_check import OtherValueRead


def run_with_reads(job, run_program, known, **settings):
    """Return the outcome of a job's program on simulated workers.

    Args:
        job: The job's function, its modules and its arguments.
        run_program: Runs a program and returns its outcome.
        known: Gets the values of the last program that it does not assume.
        settings: Those of the capture.
    """
    function, modules, arguments = job
    while True:
        state = torch.get_rng_state()
        try:
            program = capture_job(function, modules, arguments, True, reads=known, **settings)
            return run_program(program)
        except OtherValueRead as other:
            expected = [output.expected for _, output in program.outputs if output.kind == "check"]
            known[:] = [*expected[: other.position], other.value]
        except ValueNeeded:
            known.append(compute_next_value(job, run_program, known))
        torch.set_rng_state(state)


def compute_next_value(job, run_program, known):
    """Return the value that a job reads after the known ones, by a program that ends there."""
    function, modules, arguments = job
    source = JobSource(name="job", function=function, modules=modules, trains=True)
    shapes = [ArgumentShape(shape=tuple(item.shape), dtype=item.dtype) for item in arguments]
    reads = ValueReads(known, ends_at_unknown=True)
    program = capture(source, lambda tensors: (tuple(tensors), {}), shapes, DEVICE, reads=reads).program
    return run_program(program).results[-1].item()

"""Rows that values select, in a pipeline: each microbatch selects its own, and the training is that of one device."""

import pytest
import torch
from selected_row_models import FORMS, LABELS, LOSSES, WIDTH, Mixture
from simulated_pipelines import DEVICE, capture_job, run_on_simulated_pipeline
from simulated_ranks import assert_runs_as_plain
from torch import nn

from rankless.compiler.capture.capture import ArgumentShape, JobSource, capture
from rankless.compiler.capture.value_reads import ValueNeeded, ValueReads
from rankless.compiler.lowering.value_check import OtherValueRead


class Stack(nn.Module):
    """Layers of experts, which selects rows in several stages."""

    def __init__(self, form, layers=2):
        super().__init__()
        self.layers = nn.ModuleList(Mixture(form) for _ in range(layers))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def make_stack_job(form, rows=12, layers=2):
    torch.manual_seed(0)
    model = Stack(form, layers).double()

    def train(x, wanted):
        return (model(x) - wanted).square().mean()

    return train, {"model": model}, [torch.randn(rows, WIDTH, dtype=torch.float64) for _ in range(2)]


def make_loss_job(loss, labels=LABELS):
    """Return a job that trains two layers by a loss of some rows."""
    torch.manual_seed(0)
    model, compute = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, 5)).double(), LOSSES[loss]

    def train(x, labels):
        return compute(model(x), labels)

    return train, {"model": model}, [torch.randn(len(labels), WIDTH, dtype=torch.float64), torch.tensor(labels)]


def check(job, workers=2, microbatches=3, schedule="1f1b", **settings):
    """Assert that a job is the same in a pipeline as on one device, after captures for the values that it reads.

    Return the outcome, and the values that the last program has read beyond what it assumes.
    """
    function, modules, arguments = job
    known = []
    cutting = {"workers": workers, "microbatches": microbatches, "schedule": schedule}

    def run():
        while True:
            state = torch.get_rng_state()
            try:
                program = capture_job(function, modules, arguments, True, reads=known, **settings)
                return run_on_simulated_pipeline(program, modules, arguments, **cutting)
            except OtherValueRead as other:
                expected = [output.expected for _, output in program.outputs if output.kind == "check"]
                known[:] = [*expected[: other.position], other.value]
            except ValueNeeded:
                known.append(find_value(job, known, cutting))
            torch.set_rng_state(state)

    return assert_runs_as_plain(run, function, modules, arguments), known


def find_value(job, known, cutting):
    """Return the value that a job reads after the known ones, by a program that ends there."""
    function, modules, arguments = job
    source = JobSource(name="job", function=function, modules=modules, trains=True)
    shapes = [ArgumentShape(shape=tuple(item.shape), dtype=item.dtype) for item in arguments]
    reads = ValueReads(known, ends_at_unknown=True)
    program = capture(source, lambda tensors: (tuple(tensors), {}), shapes, DEVICE, reads=reads).program
    return run_on_simulated_pipeline(program, modules, arguments, **cutting).results[-1].item()


@pytest.mark.parametrize("form", FORMS)
def test_a_mixture_is_the_same_training(form):
    check(make_stack_job(form))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("workers", "schedule"), [(2, "interleaved"), (3, "zero-bubble"), (2, "gpipe")])
def test_stages_that_end_between_experts(form, workers, schedule):
    check(make_stack_job(form, layers=1), workers, 2, schedule)


@pytest.mark.parametrize("form", FORMS)
def test_few_rows_so_that_microbatches_and_experts_have_none(form):
    check(make_stack_job(form, rows=3))


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_of_selected_rows_is_the_same_training_or_is_refused(loss):
    check(make_loss_job(loss))

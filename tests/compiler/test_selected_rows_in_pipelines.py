"""Rows that values select, in a pipeline: each microbatch selects its own, and the training is that of one device."""

import pytest
import torch
from programs_with_reads import run_with_reads
from selected_row_models import EXPERTS, FORMS, LABELS, LOSSES, WIDTH, Mixture
from simulated_pipelines import run_on_simulated_pipeline
from simulated_ranks import assert_runs_as_plain
from torch import nn

from rankless.errors import CaptureError

OF_THE_WHOLE_BATCH = (
    "mean_of_selected_elements",
    "mean_of_selected_rows",
    "softmax_over_selected_rows",
    "similarities_of_selected_rows",
    "norms_of_selected_rows",
    "slices_of_selected_rows",
    "questions_of_the_backward_pass",
    "columns_of_selected_places",
)
"""Losses whose gradients depend on rows of all microbatches, or on their number, which the model's values decide."""


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

    def run_program(program):
        return run_on_simulated_pipeline(program, modules, arguments, **cutting)

    def run():
        return run_with_reads(job, run_program, known, **settings)

    return assert_runs_as_plain(run, function, modules, arguments), known


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("form", FORMS)
def test_a_mixture_is_the_same_training(form):
    check(make_stack_job(form))


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("workers", "schedule"), [(2, "interleaved"), (3, "zero-bubble"), (2, "gpipe")])
def test_stages_that_end_between_experts(form, workers, schedule):
    check(make_stack_job(form, layers=1), workers, 2, schedule)


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS)
def test_few_rows_so_that_microbatches_and_experts_have_none(form):
    check(make_stack_job(form, rows=3))


@pytest.mark.ci_sample(4)
@pytest.mark.parametrize("loss", [name for name in LOSSES if name not in OF_THE_WHOLE_BATCH])
def test_a_loss_of_selected_rows_is_the_same_training(loss):
    check(make_loss_job(loss))


@pytest.mark.parametrize("labels", [(1,) * 12, (0,) * 11 + (2,), (-100,) * 6 + (3,) * 6], ids=["all", "one", "half"])
@pytest.mark.parametrize("loss", ["select_targets", "numbers_as_values", "rows_as_a_result"])
@pytest.mark.ci_sample(3)
def test_all_rows_one_row_or_rows_of_few_microbatches(loss, labels):
    check(make_loss_job(loss, labels))


def test_no_row_at_all():
    outcome, _ = check(make_loss_job("select_targets", (-100,) * 12))
    assert outcome.results[0].isnan()


@pytest.mark.ci_sample(3)
@pytest.mark.parametrize("loss", OF_THE_WHOLE_BATCH)
def test_a_loss_that_needs_all_selected_rows_is_refused_with_its_line(loss):
    with pytest.raises(CaptureError, match="which needs the whole batch") as error:
        check(make_loss_job(loss))
    assert "selected_row_models.py:" in str(error.value)


class Packed(nn.Module):
    """Layers on the rows of real tokens only, as models without padding have them."""

    def __init__(self, early):
        super().__init__()
        self.words, self.layers = nn.Embedding(9, WIDTH), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.early = early

    def forward(self, ids):
        x = self.words(ids)
        known = ids > 2 if self.early else x.detach().sum(-1) > 0
        rows = x[known]
        for layer in self.layers:
            rows = rows + torch.tanh(layer(rows))
        whole = torch.zeros_like(x)
        whole[known] = rows
        return whole, rows


@pytest.mark.ci_sample(2)
@pytest.mark.parametrize("early", [True, False], ids=["by arguments", "by values of the model"])
@pytest.mark.parametrize(("workers", "schedule"), [(2, "1f1b"), (3, "gpipe"), (2, "interleaved"), (2, "zero-bubble")])
def test_rows_that_a_first_stage_selects_go_through_all_stages(early, workers, schedule):
    torch.manual_seed(0)
    model = Packed(early).double()

    def train(ids):
        whole, rows = model(ids)
        return whole.square().mean() + rows.sum() / ids.numel(), rows.detach()

    outcome, _ = check((train, {"model": model}, [torch.randint(0, 9, (7, 5))]), workers, 3, schedule)
    assert sum(outcome.sent_bytes) > 0


def test_stages_receive_the_numbers_of_rows_that_they_need():
    """The second stage makes a tensor with as many rows as the first one has selected."""
    torch.manual_seed(0)
    first, second = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()

    def train(x):
        hidden = first(x)
        rows = hidden[hidden[:, 0] > 0]
        found = second(rows)
        ones = torch.ones(rows.shape[0], 1, dtype=x.dtype)
        return (found * ones).square().sum() + (rows * found).sum()

    outcome, _ = check((train, {"first": first, "second": second}, [torch.randn(12, WIDTH, dtype=torch.float64)]))
    moves = [(item.value, item.bytes) for item in outcome.programs[0].collectives]
    assert ("number of selected rows", 8) in moves


def test_draws_for_selected_rows_of_the_model_are_refused():
    job = make_stack_job("by_numbers")
    job[1]["model"].layers[0].dropout.p = 0.5
    with pytest.raises(CaptureError, match=r"dropout of model.layers.0.dropout .*whole batch"):
        check(job)


@pytest.mark.exhaustive
def test_an_index_that_python_has_read_is_a_constant():
    """So `mask[expert]` waits for no other microbatch."""
    function, modules, arguments = make_stack_job("by_hit_experts")
    outcome, known = check((function, modules, arguments))
    assert len(known) > EXPERTS
    graph = outcome.programs[0].sharded.logical.graph
    constants = {node for node in graph.nodes if node.target is torch.ops.aten.full.default}
    indices = [node.args[1][0] for node in graph.nodes if node.target is torch.ops.aten.index.Tensor]
    assert len([item for item in indices if item in constants]) == 2 * EXPERTS

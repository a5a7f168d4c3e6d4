"""Rows that values select, as `x[mask]` does: the same training on all meshes; workers compute their own rows."""

import pytest
import torch
from programs_with_reads import run_with_reads
from selected_row_models import EXPERTS, FORMS, LABELS, LOSSES, WIDTH, make_loss_job, make_mixture_job
from simulated_pipelines import capture_job
from simulated_ranks import assert_runs_as_plain, assert_same_as_plain, divide_evenly, run_program_on_axes
from torch import nn

from rankless.compiler.accumulation.loss_normalizers import add_loss_normalizers
from rankless.errors import CaptureError

MESHES = ((2,), (3,), (2, 2))


def check(job, mesh, dims=0, **settings):
    """Assert that a job is the same on a mesh as on one device, after captures for the values that it reads.

    Return the outcome, and the values of the last program.
    """
    function, modules, arguments = job
    given = [dims if isinstance(dims, tuple) else (dims,) * len(mesh) for _ in arguments]
    shardings = [divide_evenly(item.shape, mesh, each) for item, each in zip(arguments, given, strict=True)]
    known = []

    def run_program(program):
        return run_program_on_axes(program, arguments, modules, mesh, shardings)

    def run():
        return run_with_reads(job, run_program, known, **settings)

    return assert_runs_as_plain(run, function, modules, arguments), known


def list_moves(outcome):
    """Return what moves for operators, besides sums of single numbers and numbers of rows."""
    return [item for item in outcome.local.collectives if item.purpose in ("input", "operator") and item.bytes > 16]


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_mixture_is_the_same_training_and_no_token_moves(form, mesh):
    outcome, _ = check(make_mixture_job(form), mesh)
    assert [item for item in list_moves(outcome) if item.bytes >= 12 * WIDTH * 8] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS)
def test_few_tokens_so_that_workers_and_experts_have_none(form):
    check(make_mixture_job(form, rows=2), (3,))


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("form", FORMS)
def test_tokens_of_sequences(form):
    check(make_mixture_job(form, rows=5, length=3), (2,))


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("mesh", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("form", ["by_numbers", "by_mask_of_places", "by_mask"])
def test_dropout_of_selected_rows_draws_as_one_device(form, mesh):
    """Rows by a mask with the tokens in its last dim are in another order, so they are gathered for the draw."""
    outcome, _ = check(make_mixture_job(form, dropout=0.5), mesh)
    assert bool([item for item in list_moves(outcome) if "dropout" in item.reason]) == (form == "by_mask_of_places")


@pytest.mark.ci_sample(3)
@pytest.mark.parametrize("mesh", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_of_selected_rows_is_the_same_training(loss, mesh):
    check(make_loss_job(loss), mesh)


@pytest.mark.ci_sample(2)
@pytest.mark.parametrize("labels", [(1,) * 12, (0,) * 11 + (2,), (-100,) * 6 + (3,) * 6], ids=["all", "one", "half"])
@pytest.mark.parametrize("loss", ["select_targets", "numbers_as_values", "slices_of_selected_rows", "losses_per_row"])
def test_all_rows_one_row_or_rows_of_one_worker(loss, labels):
    if loss == "slices_of_selected_rows" and labels.count(-100) == 0:
        labels = labels[:4] + (-100,) * 8
    check(make_loss_job(loss, labels), (2,))


def test_no_row_at_all():
    check(make_loss_job("losses_per_row", (-100,) * 12), (2,))
    outcome, _ = check(make_loss_job("select_targets", (-100,) * 12), (2,))
    assert outcome.results[0].isnan()


def test_a_selected_loss_moves_no_scores():
    outcome, _ = check(make_loss_job("select_targets"), (2,))
    assert list_moves(outcome) == []


def test_a_comparison_with_a_number_of_rows_is_read_as_its_truth_value():
    """So one program holds for all numbers of rows that each expert may get, but none."""
    outcome, known = check(make_mixture_job("by_numbers_if_any"), (2,))
    assert known == []
    checks = [output.expected for _, output in outcome.sharded.logical.outputs if output.kind == "check"]
    assert checks == [False] * EXPERTS
    _, known = check(make_mixture_job("by_numbers_if_any", rows=1), (2,))
    assert True in known


def test_an_expert_without_rows_has_no_gradient_where_the_job_skips_it():
    outcome, _ = check(make_mixture_job("by_numbers_if_any", rows=1), (2,))
    function, modules, arguments = make_mixture_job("by_numbers_if_any", rows=1)
    function(*arguments).backward()
    wanted = {f"model.{name}" for name, item in modules["model"].named_parameters() if item.grad is not None}
    assert set(outcome.gradients) == wanted
    assert len(wanted) < len(list(modules["model"].parameters()))


def test_a_number_of_rows_is_read_where_python_needs_it():
    _, known = check(make_loss_job("divide_by_len"), (2,))
    assert known == [sum(label > 0 for label in LABELS)]


def test_one_program_serves_several_batch_sizes():
    for form in ("by_numbers", "by_mask_of_places"):
        function, modules, arguments = make_mixture_job(form, rows=10)
        captured_at = [torch.randn(7, WIDTH, dtype=torch.float64) for _ in arguments]
        assert_same_as_plain(function, modules, arguments, 2, captured_at=captured_at)


def test_rows_of_different_masks():
    """They are as many here, but the program does not show it."""
    layer = nn.Linear(WIDTH, 5).double()

    def train(x, labels):
        rows = layer(x)
        return (rows[labels > 0] * x[labels < 0][:, :1]).sum()

    x = torch.randn(8, WIDTH, dtype=torch.float64)
    check((train, {"model": layer}, [x, torch.tensor([1, -1, 0, 2, -3, -9, 4, 0])]), (2,))
    with pytest.raises(CaptureError, match=r"selections of (1 and 4|4 and 1) rows") as error:
        check((train, {"model": layer}, [x, torch.tensor([1, -1, 0, 2, 3, 0, 4, 0])]), (2,))
    assert "test_selected_rows.py" in str(error.value)


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["by_numbers", "by_mask_of_places"])
def test_positions_divided_by_another_axis(form):
    check(make_mixture_job(form, rows=4, length=6), (2, 2), dims=(0, 1))


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["by_numbers", "by_mask"])
def test_values_can_be_computed_again(form):
    outcome, _ = check(make_mixture_job(form), (2,), recompute=1.0)
    assert outcome.local.recomputed > 0


def test_bfloat16_under_autocast():
    function, modules, arguments = make_mixture_job("by_mask_of_places")
    modules["model"].float()

    def train(x, wanted):
        with torch.autocast("cpu", torch.bfloat16):
            return (modules["model"](x).float() - wanted).square().mean()

    arguments = [item.float() for item in arguments]
    function = train
    program = capture_job(function, modules, arguments, True)
    shardings = [divide_evenly(item.shape, (2,), (0,)) for item in arguments]
    outcome = run_program_on_axes(program, arguments, modules, (2,), shardings)
    assert torch.allclose(outcome.results[0], train(*arguments).detach(), rtol=1e-2)


def analyze(loss):
    """Return the program that gradient accumulation makes of a job's."""
    function, modules, (_, labels) = make_loss_job(loss)

    def capture_with_rows(times, reads=()):
        rows = labels.repeat(times)
        given = [torch.zeros(len(rows), WIDTH, dtype=torch.float64), rows]
        return capture_job(function, modules, given, True, reads=list(reads))

    program = capture_with_rows(1)
    reads = [output.expected for _, output in program.outputs if output.kind == "check"]  # PyTorch 2.11 asks once
    return add_loss_normalizers(program, capture_with_rows, {0: 0, 1: 0}, reads=reads, line="script.py:1")


@pytest.mark.parametrize(
    "loss", ["select_targets", "divide_by_number_of_targets", "losses_per_row", "mean_of_selected_elements"]
)
@pytest.mark.ci_sample(2)
def test_accumulation_knows_by_how_many_selected_rows_a_loss_divides(loss):
    assert analyze(loss) is not None


@pytest.mark.parametrize("loss", ["mean_of_selected_rows", "divide_by_a_size", "numbers_as_values"])
@pytest.mark.ci_sample(1)
def test_accumulation_refuses_other_losses_of_selected_rows(loss):
    with pytest.raises(CaptureError, match="a loss that is a mean or a sum over the rows of the batch"):
        analyze(loss)


@pytest.mark.exhaustive
def test_what_the_backward_pass_asks_of_a_number_of_rows_is_read_at_the_end_of_the_function():
    outcome, known = check(make_loss_job("questions_of_the_backward_pass"), (2,))
    checks = [output.expected for _, output in outcome.sharded.logical.outputs if output.kind == "check"]
    assert len(checks) > 0
    assert known == []
    _, known = check(make_loss_job("questions_of_the_backward_pass", (0,) * 11 + (2,)), (2,))
    assert True in known


def make_combinations_job():
    """Return a job whose backward pass makes zeros, as many as a mask selects."""
    layer = nn.Linear(1, 1).double()

    def train(x):
        return torch.combinations(layer(x)[:, 0], 2, with_replacement=True).square().sum()

    return train, {"layer": layer}, [torch.randn(4, 1, dtype=torch.float64)]


@pytest.mark.ci_sample(2)
@pytest.mark.parametrize("loss", ["combinations", *[loss for loss in LOSSES if loss != "divide_by_len"]])
def test_a_program_is_divided_again_among_fewer_workers_and_more(loss):
    """What one division knew of its rows means nothing in the next."""
    function, modules, arguments = make_combinations_job() if loss == "combinations" else make_loss_job(loss)
    program = capture_job(function, modules, arguments, trains=True)
    for mesh in ((3,), (2,), (2, 2), (3,)):
        shardings = [divide_evenly(item.shape, mesh, (0,) * len(mesh)) for item in arguments]

        def run(mesh=mesh, shardings=shardings):
            return run_program_on_axes(program, arguments, modules, mesh, shardings)

        assert_runs_as_plain(run, function, modules, arguments)

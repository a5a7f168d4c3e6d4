"""A loss that cannot accumulate over calls raises with its line; a call without valid targets has no weight."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from support.processes import on_mesh
from torch import nn

from rankless.context.world import World
from rankless.errors import CaptureError, StepError
from rankless.jobs.job import make_job
from rankless.jobs.job_definition import StepOptions
from rankless.parallel.mesh import Mesh
from rankless.user_code import display_name

CLASSES = 4


def contrastive(model):
    def loss(x, y):
        one, other = F.normalize(model(x)), F.normalize(model(y))
        return F.cross_entropy(one @ other.t(), torch.arange(len(x)))  # the line

    return loss


def root_of_a_mean(model):
    def loss(x, y):
        return (model(x) - y[:, :4]).square().mean().sqrt()  # the line

    return loss


def sum_beside_a_mean(model):
    def loss(x, _):
        out = model(x)
        return (
            out.square().mean()  # the line
            + out.sum()
        )

    return loss


def sum_and_penalty(model):
    def loss(x, y):
        return (model(x) - y[:, :4]).square().sum() + model.weight.square().sum()

    return loss


def statistics_of_the_batch(model):
    def loss(x, y):
        out = model(x)
        return ((out - out.mean(0)) * y[:, :4]).mean()  # the line

    return loss


def places_in_the_batch(model):
    def loss(x, _):
        return (model(x).sum(1) * torch.arange(len(x))).mean()  # the line

    return loss


def rows_of_other_samples(model):
    def loss(x, _):
        return (model(x)[torch.arange(len(x)).flip(0)] * model(x)).mean()  # the line

    return loss


def numbers_of_rows_as_classes(model):
    def loss(x, _):
        return F.nll_loss(model(x).log_softmax(1), torch.arange(len(x)) % 4)  # the line

    return loss


def shifted_rows(model):
    def loss(x, y):
        return (model(x) - y[:, :4].roll(1, 0)).square().mean()  # the line

    return loss


def mixed_rows(model):
    def loss(x, y):
        order = torch.randperm(len(x))  # the line
        return (model(x) - y[order, :4]).square().mean()

    return loss


def divided_by_a_prediction(model):
    def loss(x, y):
        weight = model(x).exp()[:, 0]
        return (weight * y[:, 0]).sum() / weight.sum()  # the line

    return loss


def number_in_a_power(model):
    def loss(x, y):
        return (model(x) - y[:, :4]).square().mean() + model(x).mean() * len(x) ** 0.5  # the line

    return loss


def softmax_over_samples(model):
    def loss(x, _):
        return (model(x).softmax(0) * x[:, :4]).mean()  # the line

    return loss


def attention_between_samples(model):
    def loss(x, _):
        hidden = model(x)[None, None]
        return F.scaled_dot_product_attention(hidden, hidden, hidden).square().mean()  # the line

    return loss


REFUSED = [
    contrastive, root_of_a_mean, sum_beside_a_mean, sum_and_penalty, statistics_of_the_batch,
    places_in_the_batch, rows_of_other_samples, numbers_of_rows_as_classes,
    shifted_rows, mixed_rows, divided_by_a_prediction, number_in_a_power,
    softmax_over_samples, attention_between_samples,
]  # fmt: skip


@pytest.mark.ci_sample(3)
@pytest.mark.parametrize("build", REFUSED, ids=lambda build: build.__name__)
def test_a_loss_that_cannot_accumulate_raises_with_its_line_untrained(build):
    model = nn.Linear(5, 4)
    before = model.weight.detach().clone()
    world = World(mesh=Mesh.solo(), notify=lambda _: None, send_record=lambda _: None)
    job = make_job(
        build(model),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        view="consistent",
        world=lambda: world,
        step_options=StepOptions(accumulate=2),
    )
    lines, first = inspect.getsourcelines(build)
    marked = [first + place for place, text in enumerate(lines) if "# the line" in text]
    with pytest.raises(CaptureError) as raised:
        job(torch.randn(6, 5), torch.randn(6, 5))
    assert "mean or a sum over the rows" in str(raised.value.expected)
    assert raised.value.where.split(":")[0] == display_name(inspect.getsourcefile(build))
    if marked:
        assert f":{marked[0]}" in raised.value.where
    assert torch.equal(model.weight, before)


def train_with_diverging_weights(mesh, mask):
    """Two means over counts in one proportion, until a call has another length or other valid rows."""
    model = nn.Linear(5, 4)

    def loss(x, y):
        out = model(x)
        if mask:
            chosen = (y > 0).to(out.dtype)
            return out.square().mean() + (out.mean((1, 2)) * chosen).sum() / chosen.sum()
        return out.square().mean() + out.mean((1, 2)).mean()

    world = World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None)
    job = make_job(
        loss,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        view="consistent",
        world=lambda: world,
        step_options=StepOptions(accumulate=2),
    )
    torch.manual_seed(1)
    job(torch.randn(6, 3, 5), torch.arange(6.0))
    before = [item.grad.clone() for item in model.parameters()]
    try:
        job(torch.randn(6, 3 if mask else 4, 5), torch.arange(6.0) - (2 if mask else 0))
    except StepError as error:
        return error.found, all(map(torch.equal, before, (item.grad for item in model.parameters())))
    return None


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("mask", [True, False], ids=["valid rows", "lengths"])
@pytest.mark.ci_sample(2)
def test_loss_terms_with_diverging_weights_raise_at_that_call(workers, mask):
    ranks = (
        [train_with_diverging_weights(Mesh.solo(), mask)]
        if workers == 1
        else on_mesh(workers, train_with_diverging_weights, mask)
    )
    for found, unchanged in ranks:
        assert found.startswith("counts of 72, 3 " if mask else "counts of 96, 6 ")
        assert unchanged, "the gradient of the calls before is lost"


def test_calls_without_a_valid_target_have_no_weight():
    """The first call of a group, or any other, may have none: its gradient is not a number, and it has no weight."""

    def train_in_order(order):
        torch.manual_seed(0)
        model = nn.Linear(5, CLASSES).double()
        x, y = torch.randn(3, 6, 5).double(), torch.randint(0, CLASSES, (3, 6))
        masks = torch.stack([torch.zeros(6), torch.tensor([1.0, 1, 0, 0, 1, 0]), torch.ones(6)]).double()
        world = World(mesh=Mesh.solo(), notify=lambda _: None, send_record=lambda _: None)
        job = make_job(
            lambda x, y, mask: (F.cross_entropy(model(x), y, reduction="none") * mask).sum() / mask.sum(),
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            view="consistent",
            world=lambda: world,
            step_options=StepOptions(accumulate=3),
        )
        for place in order:
            job(x[place], y[place], masks[place])
        assert job.stepped
        return model.weight.detach(), model.weight.grad

    first, _ = train_in_order([1, 2, 0])
    assert first.isfinite().all()
    for order in ([0, 1, 2], [2, 0, 1]):
        torch.testing.assert_close(train_in_order(order)[0], first, rtol=1e-12, atol=1e-14)


def accumulate_two_calls(loss, calls):
    """Return the parameter after one step of two calls, each of (rows, number)."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    world = World(mesh=Mesh.solo(), notify=lambda _: None, send_record=lambda _: None)
    job = make_job(
        lambda x, number: loss(model(x), number),
        model={"model": model},
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        view="consistent",
        world=lambda: world,
        step_options=StepOptions(accumulate=2),
    )
    for rows, number in calls:
        job(torch.ones(rows, 3).double(), number)
    return model.weight.detach()


@pytest.mark.parametrize("calls", [[(5, 5), (5, 5)], [(4, 4), (6, 6)]])
def test_a_divisor_that_may_be_the_number_of_rows_or_a_constant_is_refused(calls):
    with pytest.raises(CaptureError, match="it may be the number of rows, or a constant"):
        accumulate_two_calls(lambda out, number: out.sum() / number, calls)


def test_a_number_that_has_differed_from_the_rows_is_a_constant():
    found = accumulate_two_calls(lambda out, number: out.sum() / number, [(6, 5), (5, 5)])
    torch.manual_seed(0)
    start = nn.Linear(3, 1).double().weight.detach()
    torch.testing.assert_close(found, start - 0.1 * (6 + 5) / 5)


def test_a_number_that_changes_no_weight_may_equal_the_rows():
    found = accumulate_two_calls(lambda out, number: (out * number).mean(), [(5, 5), (5, 5)])
    torch.manual_seed(0)
    torch.testing.assert_close(found, nn.Linear(3, 1).double().weight.detach() - 0.1 * 5)

"""A job whose Python reads values of tensors: its checks raise, other values use other programs, and a loop ends."""

import pytest
import torch
import torch.nn.functional as F
from support.processes import on_mesh
from torch import nn

from rankless.compiler.capture import value_reads
from rankless.context.world import World
from rankless.errors import CaptureError
from rankless.jobs.job import make_job
from rankless.jobs.job_definition import StepOptions
from rankless.jobs.views.captured import ConsistentView
from rankless.parallel.mesh import Mesh
from rankless.user_code import display_name


def make_training(mesh, loss, **options):
    torch.manual_seed(2)
    model, notices = nn.Linear(3, 2).double(), []
    world = World(mesh=mesh, notify=notices.append, send_record=lambda _: None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = make_job(
        lambda *arguments: loss(model, *arguments),
        model=model,
        optimizer=optimizer,
        view="consistent",
        world=lambda: world,
        step_options=StepOptions(**options),
    )
    if mesh.size == 1:
        job._views.view = ConsistentView(job.definition, world)
    return model, job, notices


def checked_loss(model, x):
    if not torch.isfinite(x).all():
        raise ValueError("the batch has a value that is not finite")
    return model(F.dropout(x, 0.5)).square().mean()


def train_with_a_bad_batch(mesh):
    model, job, _ = make_training(mesh, checked_loss)
    torch.manual_seed(5)
    batches = [torch.randn(5, 3).double() for _ in range(3)]
    bad = batches[1].clone()
    bad[4, 2] = torch.nan
    job(batches[0])
    before = [item.detach().clone() for item in model.parameters()]
    generator = torch.get_rng_state()
    with pytest.raises(ValueError, match="not finite"):
        job(bad)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(map(torch.equal, model.parameters(), before))
    job(batches[2])
    return [item.detach().clone() for item in model.parameters()]


def train_plainly_without_the_bad_batch():
    torch.manual_seed(2)
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(5)
    batches = [torch.randn(5, 3).double() for _ in range(3)]
    for batch in (batches[0], batches[2]):
        optimizer.zero_grad()
        checked_loss(model, batch).backward()
        optimizer.step()
    return [item.detach() for item in model.parameters()]


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.ci_sample(1)
def test_a_check_of_the_job_raises_on_every_rank_and_changes_nothing(workers):
    expected = train_plainly_without_the_bad_batch()
    found = [train_with_a_bad_batch(Mesh.solo())] if workers == 1 else on_mesh(workers, train_with_a_bad_batch)
    for parameters in found:
        torch.testing.assert_close(parameters, expected, rtol=0, atol=1e-12)


def solve_systems(mesh):
    model, job, _ = make_training(mesh, lambda model, x: torch.linalg.inv(model(x).t() @ model(x)).sum())
    job(torch.randn(4, 3, generator=torch.Generator(torch.get_default_device()).manual_seed(1)).double())
    before = [item.detach().clone() for item in model.parameters()]
    with torch.no_grad():
        model.weight.zero_(), model.bias.zero_()
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        job(torch.ones(4, 3).double())
    assert not any(item.any() for item in model.parameters())
    return before


def test_a_singular_matrix_raises_on_every_rank_as_in_the_plain_script():
    alone, *others = [solve_systems(Mesh.solo()), *on_mesh(2, solve_systems)]
    for found in others:
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-12)


def test_a_value_that_always_changes_is_warned_of_with_its_line():
    _, job, notices = make_training(Mesh.solo(), lambda model, x: model(x).mean() * x.max().item())
    for number in range(8):
        job(torch.full((4, 3), float(number)).double())
    (notice,) = [notice for notice in notices if "reads the value of a tensor here" in notice]
    assert f"{display_name(__file__)}:" in notice


def test_two_values_in_turn_are_captured_once_each():
    captures = []
    _, job, _ = make_training(
        Mesh.solo(), lambda model, x: captures.append(1) or model(x).mean() * (2 if x.sum() > 0 else 3)
    )
    with pytest.raises(CaptureError):  # a list that the job appends to is refused
        job(torch.ones(4, 3).double())


def test_a_loop_that_never_ends_is_refused_with_its_line(monkeypatch):
    monkeypatch.setattr(value_reads, "MAX_READS", 16)  # each value is one more trace

    def loss(model, x):
        while x.sum() > 0:
            x = x + 1
        return model(x).mean()

    _, job, _ = make_training(Mesh.solo(), loss)
    with pytest.raises(CaptureError, match="reads at most 16 values"):
        job(torch.ones(4, 3).double())


def accumulate(mesh):
    def loss(model, x):
        out = model(x).square().sum(1)
        return out.mean() if x[0, 0] > 0 else out.sum()

    model, job, _ = make_training(mesh, loss, accumulate=2)
    for sign in (1, 1, -1, -1):
        job(sign * torch.ones(4, 3).double())
    return [item.detach().clone() for item in model.parameters()]


def test_an_accumulated_loss_may_depend_on_a_value():
    torch.manual_seed(2)
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for sign in (1, -1):
        optimizer.zero_grad()
        out = model(sign * torch.ones(8, 3).double()).square().sum(1)
        (out.mean() if sign > 0 else out.sum()).backward()
        optimizer.step()
    expected = [item.detach() for item in model.parameters()]
    for found in (accumulate(Mesh.solo()), *on_mesh(2, accumulate)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)

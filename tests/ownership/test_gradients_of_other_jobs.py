"""A job without zero= that trains parameters which another job divides behaves on several workers as on one device."""

import pytest
import torch
from support.processes import on_mesh
from torch import nn

from rankless.context.world import World
from rankless.jobs.job import make_job
from rankless.jobs.job_definition import StepOptions
from rankless.parallel.mesh import Mesh


def train_in_turn(mesh, zero, accumulate, turns):
    """Call the first job and the other as `turns` says.

    Return which parameters have a gradient after each call, and the parameters at the end.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    extra = nn.Linear(3, 3).double()
    world = World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None)

    def make(function, modules, options):
        parameters = [item for module in modules for item in module.parameters()]
        return make_job(
            lambda x: function(x),  # both jobs have one name and one line, as those of a function that makes jobs
            model=modules,
            optimizer=torch.optim.AdamW(parameters, lr=0.1),
            view=None,
            world=lambda: world,
            step_options=options,
        )

    first = make(lambda x: model(x).square().mean(), [model], StepOptions(zero=zero))
    other = make(lambda x: extra(model(x)).exp().mean(), [model, extra], StepOptions(accumulate=accumulate))
    shown = []
    for turn in turns:
        (first if turn == "f" else other)(torch.randn(4, 4, dtype=torch.float64))
        shown.append([parameter.grad is not None for parameter in (*model.parameters(), *extra.parameters())])
    other.flush()
    shown.append([parameter.grad is not None for parameter in (*model.parameters(), *extra.parameters())])
    return shown, [parameter.detach().clone() for parameter in (*model.parameters(), *extra.parameters())]


@pytest.mark.ci_sample(2)
@pytest.mark.parametrize(("accumulate", "turns"), [(1, "ofoofo"), (3, "ofoofo"), (3, "oof"), (2, "foofo")])
@pytest.mark.parametrize("zero", [None, "optimizer", "gradients", "parameters"])
def test_gradients_are_shown_and_accumulated_as_on_one_device(zero, accumulate, turns):
    wanted_shown, wanted = train_in_turn(Mesh.solo(), zero, accumulate, turns)
    for shown, found in on_mesh(2, train_in_turn, zero, accumulate, turns):
        assert shown == wanted_shown
        for ours, plain in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)


def test_a_flush_steps_with_the_gradients_of_its_own_calls():
    """Another job's call in between leaves its own `.grad`, and its step changes the parameters."""
    _, (weight, *_) = train_in_turn(Mesh.solo(), None, 3, "oof")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    extra = nn.Linear(3, 3).double()
    first = torch.optim.AdamW(model.parameters(), lr=0.1)
    other = torch.optim.AdamW([*model.parameters(), *extra.parameters()], lr=0.1)
    batches = [torch.randn(4, 4, dtype=torch.float64) for _ in range(3)]
    loss = sum(extra(model(x)).exp().mean() for x in batches[:2]) / 2
    kept = torch.autograd.grad(loss, list(model.parameters()))
    model(batches[2]).square().mean().backward()
    first.step()
    for parameter, gradient in zip(model.parameters(), kept, strict=True):
        parameter.grad = gradient
    other.step()
    torch.testing.assert_close(weight, model[0].weight.detach(), rtol=1e-12, atol=1e-12)

"""Forks of PyTorch's generator in a job draw what the plain script draws, and leave the generator as it does."""

import pytest
import torch
import torch.nn.functional as F
from support.processes import on_mesh
from torch import nn
from torch.random import fork_rng

from rankless.context.world import World
from rankless.jobs.job import make_job
from rankless.parallel.mesh import Mesh


def seeded(model, x):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        noise = torch.randn(x.shape, dtype=x.dtype)
    return (model(x + noise) * torch.rand(len(x), 1)).square().mean()


def seeded_by_a_value(model, x):
    with fork_rng():
        torch.manual_seed(int(x[0, 0].item()))
        hidden = F.dropout(model(x), 0.4)
    return F.dropout(hidden, 0.3).square().mean()


def without_a_seed(model, x):
    with fork_rng(devices=[]):
        noise = torch.randn_like(x)
        noise = noise + torch.rand_like(x)
    again = torch.randn_like(x)
    return F.dropout(model(x + noise - 2 * again), 0.3).square().mean()


def within_each_other(model, x):
    total = torch.rand(x.shape)
    with fork_rng():
        with fork_rng():
            total = total + torch.randn_like(x)
        torch.manual_seed(5)
        total = total + F.dropout(x, 0.5)
        with fork_rng():
            first = torch.rand_like(x)
            torch.manual_seed(7)
            total = total + first * torch.rand_like(x)
        total = total + torch.randn_like(x)
        with fork_rng():
            pass
    with fork_rng(enabled=False):
        last = torch.rand_like(x)
    return (model(total) * torch.rand(len(x), 1)).mean() + last.mean() * model.weight.sum()


LOSSES = {item.__name__: item for item in (seeded, seeded_by_a_value, without_a_seed, within_each_other)}


def train(mesh, name):
    """Return the losses and weights of four calls, and the next number; plainly without a mesh."""
    torch.manual_seed(0)
    model = nn.Linear(5, 4, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    world = World(mesh=mesh or Mesh.solo(), notify=lambda _: None, send_record=lambda _: None)
    job = make_job(
        lambda x: LOSSES[name](model, x),
        model=model,
        optimizer=optimizer,
        view="consistent",
        world=lambda: world,
    )
    for call in range(4):
        x = torch.arange(35.0, dtype=torch.float64).reshape(7, 5) / 35 + call
        if mesh is None:
            optimizer.zero_grad()
            loss = LOSSES[name](model, x)
            loss.backward()
            optimizer.step()
        else:
            loss = job(x)
        found += [loss.detach(), model.weight.detach().clone()]
    return [*found, torch.rand(())]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.ci_sample(2)
def test_forks_draw_what_the_plain_script_draws(name):
    expected = train(None, name)
    for found in (train(Mesh.solo(), name), *on_mesh(2, train, name)):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def seed_without_a_fork(mesh):
    torch.manual_seed(9)
    model = nn.Linear(5, 4).double()

    def loss(x):
        with fork_rng():
            noise = torch.rand(len(x), 4, dtype=torch.float64)
        torch.manual_seed(3)
        return (model(x) * noise).mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if mesh is None:
        value = loss(torch.ones(4, 5).double())
        value.backward()
        optimizer.step()
        return value.detach(), model.weight.detach(), torch.get_rng_state()
    world = World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None)
    job = make_job(loss, model=model, optimizer=optimizer, view="consistent", world=lambda: world)
    return job(torch.ones(4, 5).double()), model.weight.detach(), torch.get_rng_state()


def test_a_job_that_seeds_outside_a_fork_is_no_program_and_draws_as_the_plain_script():
    expected = seed_without_a_fork(None)
    for found in on_mesh(2, seed_without_a_fork):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)

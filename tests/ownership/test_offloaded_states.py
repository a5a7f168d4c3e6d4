"""Pieces of states in the memory of the host: the training is the same, and collectives run on the device.

This machine has no GPU. Tensors without elements take its place: they have a device of their own.
"""

import pytest
import torch
from ownership import offloaded_pieces
from support.processes import on_mesh
from torch import nn

from rankless.context.world import World
from rankless.errors import ConfigError
from rankless.jobs.job import make_job
from rankless.jobs.job_definition import StepOptions
from rankless.records.parallel_plan import ZERO_LEVELS


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Adafactor"])
@pytest.mark.parametrize("zero", ZERO_LEVELS)
def test_the_optimizer_steps_on_the_host_and_collectives_run_on_the_device(monkeypatch, zero, optimizer):
    offloaded_pieces.check_steps(monkeypatch, zero, optimizer)


def test_the_script_sees_values_on_the_device(monkeypatch):
    offloaded_pieces.check_values(monkeypatch)


def test_a_program_gathers_pieces_of_the_host_on_the_device(monkeypatch):
    offloaded_pieces.check_gathers(monkeypatch)


def train(mesh, zero, offload):
    """Return the losses, the parameters after training, and what the plan says of each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    inputs = torch.randn(4, 6, 5, dtype=torch.float64)

    def loss(x):
        return model(x).square().mean()

    if zero is None:
        for x in inputs:
            optimizer.zero_grad()
            value = loss(x)
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            losses.append(value.item())
        return losses, [item.detach().clone() for item in model.parameters()], []
    world = World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None)
    job = make_job(
        loss,
        model=model,
        optimizer=optimizer,
        view=None,
        world=lambda: world,
        step_options=StepOptions(zero=zero, offload=offload, clip_norm=0.1),
    )
    losses = [job(x).item() for x in inputs]
    return (
        losses,
        [item.detach().clone() for item in model.parameters()],
        [item.offloaded for item in job.plan.states.values()],
    )


@pytest.mark.parametrize("zero", ZERO_LEVELS)
def test_the_training_is_the_same(zero):
    losses, parameters, _ = train(None, None, False)
    for found, values, offloaded in on_mesh(2, train, zero, True):
        assert found == pytest.approx(losses, abs=1e-12)
        torch.testing.assert_close(values, parameters, rtol=0, atol=1e-12)
        assert all(offloaded)


def train_two_jobs(mesh):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world = World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None)
    jobs = [
        make_job(
            lambda x: model(x).square().mean(),
            model=model,
            optimizer=optimizer,
            view=None,
            world=lambda: world,
            step_options=StepOptions(zero="optimizer", offload=offload),
        )
        for offload in (True, False)
    ]
    jobs[0](torch.ones(2, 4))
    with pytest.raises(ConfigError, match="offload="):
        jobs[1](torch.ones(2, 4))
    return True


def test_two_jobs_cannot_hold_a_state_in_two_memories():
    assert on_mesh(2, train_two_jobs) == [True, True]


@pytest.mark.parametrize("options", [{"offload": True}, {"offload": "host", "zero": "optimizer"}, {"offload": 1}])
def test_offload_needs_zero(options):
    with pytest.raises(ConfigError, match="offload="):
        StepOptions(**options).validate()

"""Which collectives a program has for states that are held in pieces: those that an expert would write."""

from collections import Counter

import pytest
import torch
from support.processes import on_mesh
from torch import nn

from rankless.context.world import RunSettings, World
from rankless.jobs.job import make_job
from rankless.jobs.job_definition import StepOptions

WIDTH = 512
"""A matrix has 1 MiB, the smallest group."""


class Programs:
    """Keeps the collectives of a job's programs."""

    def __init__(self):
        self.collectives = []

    def record(self, _job, local):
        self.collectives.append([(item.kind, item.backward, item.purpose) for item in local.collectives])

    def run(self, _job, bound, values, sizes):
        return bound.local(values, sizes)

    def finish(self, _known):
        pass


class Residual(nn.Module):
    """Layers after a first one, and at the end the first one again: its uses are far apart in the forward pass."""

    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.layers[0](x)


def compile_program(mesh, make_model, zero, autocast):
    torch.manual_seed(0)
    model, programs = make_model(), Programs()
    world = World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None, settings=RunSettings(programs=programs))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(x):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(x).square().mean()

    train = make_job(
        loss,
        model=model,
        optimizer=optimizer,
        view=None,
        world=lambda: world,
        step_options=StepOptions(zero=zero),
    )
    for _ in range(2):
        train(torch.ones(4, WIDTH))
    return programs.collectives


def deep():
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8)])


def residual():
    return Residual(6)


def small():
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 8))


def count(mesh_results):
    """Return the collectives of the only program of the first worker; all workers have the same."""
    assert all(result == mesh_results[0] for result in mesh_results)
    (collectives,) = mesh_results[0]
    return Counter(collectives)


@pytest.mark.parametrize("autocast", [False, True])
def test_parameters_are_gathered_for_each_pass_and_gradients_scattered_once(autocast):
    found = count(on_mesh(2, compile_program, deep, "parameters", autocast))
    # The last two layers are still there when the backward pass begins. The first one needs no gradient of its input.
    assert found["all_gather", False, "input"] == 8
    assert found["all_gather", True, "input"] == 8 - 2 - 1
    assert found["reduce_scatter", True, "gradient"] == 8
    assert found["all_reduce", True, "gradient"] == 0
    assert sum(found.values()) == 8 + 5 + 8 + 1  # and the loss


def test_a_parameter_that_is_used_twice_far_apart_is_gathered_twice():
    found = count(on_mesh(2, compile_program, residual, "parameters", False))
    # Forward: the six layers, and the first one again. It is still there when the backward pass begins.
    assert found["all_gather", False, "input"] == 7
    assert found["all_gather", True, "input"] == 4
    assert found["reduce_scatter", True, "gradient"] == 6


def test_small_parameters_share_one_gather_and_their_gradients_one_collective():
    found = count(on_mesh(2, compile_program, small, "parameters", False))
    assert found == {
        ("all_gather", False, "input"): 1,
        ("reduce_scatter", True, "gradient"): 1,
        ("all_reduce", False, "output"): 1,
    }


@pytest.mark.parametrize(("zero", "kind"), [("optimizer", "all_reduce"), ("gradients", "reduce_scatter")])
def test_whole_parameters_are_not_gathered_in_the_program(zero, kind):
    found = count(on_mesh(2, compile_program, small, zero, False))
    assert found == {(kind, True, "gradient"): 1, ("all_reduce", False, "output"): 1}

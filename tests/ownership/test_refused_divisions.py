"""What zero= does not support is refused, with its reason, before anything is divided."""

import os

import pytest
import torch
from support.processes import on_mesh
from torch import nn

from rankless.context.once_for_all_ranks import call_once
from rankless.context.world import World
from rankless.errors import ConfigError, RanklessError
from rankless.jobs.job import make_job
from rankless.jobs.job_definition import StepOptions
from rankless.parallel.mesh import Mesh


def make(world, model, optimizer, *, zero="parameters", view=None, function=None):
    return make_job(
        function or (lambda x: model(x).square().mean()),
        model=model,
        optimizer=optimizer,
        view=view,
        world=lambda: world,
        step_options=StepOptions(zero=zero),
    )


def make_world(mesh):
    return World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None)


class OwnAdafactor(torch.optim.Adafactor):
    """Another one."""


class OwnSGD(torch.optim.SGD):
    """A class of a script that may compute anything."""


@pytest.mark.parametrize(
    ("make_optimizer", "found"),
    [
        (lambda items: OwnSGD(items, lr=0.1), "OwnSGD"),
        (OwnAdafactor, "OwnAdafactor"),
    ],
)
def test_an_optimizer_that_reads_more_than_its_piece_is_refused_on_one_device_too(make_optimizer, found):
    model = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match=found):
        make(make_world(Mesh.solo()), model, make_optimizer(list(model.parameters())))


def test_hooks_of_the_script_on_steps_are_refused():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="no hooks on the steps"):
        make(make_world(Mesh.solo()), model, optimizer)


@pytest.mark.parametrize("view", ["mirrored", "whole"])
def test_other_views_are_refused(view):
    model = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="consistent view"):
        make(make_world(Mesh.solo()), model, torch.optim.SGD(model.parameters(), lr=0.1), view=view)


@pytest.mark.parametrize("zero", ["everything", "Parameters", 3, True])
def test_other_levels_are_refused(zero):
    model = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="zero= as one of 'optimizer', 'gradients', 'parameters'"):
        make(make_world(Mesh.solo()), model, torch.optim.SGD(model.parameters(), lr=0.1), zero=zero)


def test_a_job_without_optimizer_takes_no_level():
    with pytest.raises(ConfigError, match="without optimizer="):
        make(make_world(Mesh.solo()), nn.Linear(4, 4), None)


def two_levels(mesh):
    model, world = nn.Linear(4, 4), make_world(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = (make(world, model, optimizer, zero=zero) for zero in ("parameters", "optimizer"))
    first(torch.ones(4, 4))
    try:
        second(torch.ones(4, 4))
    except ConfigError as error:
        return str(error)
    return ""


def test_two_jobs_that_divide_one_parameter_differently_are_refused():
    for text in on_mesh(2, two_levels):
        assert "one division of model.weight" in text


def reads_in_once(mesh):
    model, world = nn.Linear(4, 4), make_world(mesh)
    train = make(world, model, torch.optim.SGD(model.parameters(), lr=0.1))
    train(torch.ones(4, 4))
    try:
        call_once(lambda: float(model.weight.sum()), name="total", world=world)
    except RanklessError as error:
        return str(error)
    return ""


def test_reading_a_divided_parameter_inside_once_raises_and_does_not_hang():
    for text in on_mesh(2, reads_in_once):
        assert "model.weight" in text
        assert "all ranks must take part" in text


def reads_in_a_child(mesh):
    model, world = nn.Linear(4, 4), make_world(mesh)
    make(world, model, torch.optim.SGD(model.parameters(), lr=0.1))(torch.ones(4, 4))
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            text = str(model.weight.sum())
        except RanklessError as error:
            text = str(error)
        os.write(writing, text.encode())
        os._exit(0)
    os.wait()
    return os.read(reading, 10_000).decode()


def test_reading_a_divided_parameter_in_a_child_process_raises_and_does_not_hang():
    for text in on_mesh(2, reads_in_a_child):
        assert "found:    a child process" in text


def loads_wrong_state(mesh):
    model, world = nn.Linear(4, 4), make_world(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train = make(world, model, optimizer)
    train(torch.ones(4, 4))
    optimizer.state[model.weight]["exp_avg"] = torch.zeros(3, 3)
    try:
        train(torch.ones(4, 4))
    except ConfigError as error:
        return str(error)
    return ""


def test_state_of_another_shape_is_refused():
    for text in on_mesh(2, loads_wrong_state):
        assert "exp_avg of the shape [3, 3]" in text


def converts_the_model(mesh):
    model, world = nn.Linear(4, 4), make_world(mesh)
    train = make(world, model, torch.optim.SGD(model.parameters(), lr=0.1))
    train(torch.ones(4, 4))
    try:
        model.double()
    except ConfigError as error:
        return str(error)
    return ""


def test_converting_a_divided_model_is_refused():
    for text in on_mesh(2, converts_the_model):
        assert "convert or move the model before the first call" in text


def leaves_no_gradient(mesh, zero):
    model, world = nn.Linear(4, 4), make_world(mesh)
    train = make(world, model, torch.optim.SGD(model.parameters(), lr=0.1), zero=zero)
    train(torch.ones(4, 4))
    return [parameter.grad is None for parameter in model.parameters()]


@pytest.mark.parametrize(("zero", "expected"), [("optimizer", False), ("gradients", True), ("parameters", True)])
def test_divided_gradients_are_not_shown_on_any_number_of_workers(zero, expected):
    for found in [leaves_no_gradient(Mesh.solo(), zero), *on_mesh(2, leaves_no_gradient, zero)]:
        assert found == [expected] * 2

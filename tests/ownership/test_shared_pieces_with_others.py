"""Pieces in memory that workers share, together with checkpoints, recomputation, half precision, plans and kills."""

import os
import signal
from pathlib import Path

import pytest
import torch
from checkpoint.divided_trainings import TRAININGS, continue_training, save_training, train_plainly
from collectives.backends.shared_groups import in_shared_memory
from support.processes import on_mesh
from support.training_runs import require_equal
from support.warm_runs import rankless
from test_memory_of_divided_states import BLOCK_BYTES, LAYERS, WIDTH, train
from test_programs_on_pieces import compile_program, count, deep, residual, small
from torch import nn

from bench.models import GPT
from rankless.context.world import RunSettings, World
from rankless.jobs.job import make_job
from rankless.jobs.job_definition import StepOptions

pytestmark = pytest.mark.usefixtures("one_thread")
KILLED = """
import os, signal, torch, rankless
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
@rankless.job(model=model, optimizer=optimizer, zero="parameters")
def train(x):
    return model(x).square().mean()
for step in range(50):
    train(torch.ones(4, 64))
    if step == 5:
        assert train.owner.find_shared_memory(model.weight) == 1
        if rankless.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def save_with(mesh, path, name, layout):
    return save_training(mesh, path, name, "parameters", layout=layout)


def continue_with(mesh, path, name, zero, deferred):
    return continue_training(mesh, path, name, zero, torch.float64, deferred)


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("name", TRAININGS)
def test_a_checkpoint_of_shared_pieces_continues_as_on_one_device(tmp_path, name):
    wanted = train_plainly(name, 4)
    for layout, savers in (("sharded", 3), ("whole", 2)):
        path = tmp_path / layout
        for found in on_mesh(savers, in_shared_memory, save_with, path, name, layout):
            require_equal(found, wanted)
        for workers, deferred in ((2, False), (3, True)):
            for found in on_mesh(workers, in_shared_memory, continue_with, path, name, "parameters", deferred):
                require_equal(found, wanted)
        for found in on_mesh(2, continue_with, path, name, "parameters", False):  # in pieces that are gathered
            require_equal(found, wanted)


class Programs:
    """Keeps the collectives of parameters of a job's programs."""

    def __init__(self):
        self.gathers = 0

    def record(self, _job, local):
        self.gathers += sum(item.kind == "all_gather" for item in local.collectives)

    def run(self, _job, bound, values, sizes):
        return bound.local(values, sizes)

    def finish(self, _known):
        pass


def train_in_bfloat16(mesh, way, recompute):
    """Return the losses and parameters of a GPT, and the number of gathers in its programs."""
    torch.manual_seed(0)
    model = GPT(layers=3, width=64)
    model = model.to(torch.bfloat16) if way == "bfloat16" else model
    programs = Programs()
    world = World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None, settings=RunSettings(programs=programs))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss(text):
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            return nn.functional.cross_entropy(model(text)[:, :-1].flatten(0, 1).float(), text[:, 1:].flatten())

    step = make_job(
        loss,
        model=model,
        optimizer=optimizer,
        view=None,
        world=lambda: world,
        step_options=StepOptions(zero="parameters", clip_norm=1.0),
    ).configure({}, recompute=recompute)
    text = torch.randint(0, 64, (4, 16), generator=torch.Generator(torch.get_default_device()).manual_seed(1))
    losses = [step(text) for _ in range(4)]
    return [*losses, *[item.detach().clone() for item in model.parameters()]], programs.gathers


@pytest.mark.exhaustive
@pytest.mark.parametrize("recompute", [None, "blocks"])
@pytest.mark.parametrize("way", ["float32", "bfloat16", "autocast"])
def test_shared_and_gathered_parameters_give_the_same_bits(way, recompute):
    gathered = on_mesh(2, train_in_bfloat16, way, recompute)
    shared = on_mesh(2, in_shared_memory, train_in_bfloat16, way, recompute)
    for (found, gathers), (wanted, gathers_before) in zip(shared, gathered, strict=True):
        assert all(map(torch.equal, found, wanted))
        assert gathers == 0 < gathers_before


@pytest.mark.ci_sample(2)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("make_model", "gradients"), [(deep, 8), (residual, 6), (small, 1)])
def test_programs_on_shared_pieces_gather_nothing(make_model, gradients, autocast):
    found = count(on_mesh(2, in_shared_memory, compile_program, make_model, "parameters", autocast))
    assert found == {("reduce_scatter", True, "gradient"): gradients, ("all_reduce", False, "output"): 1}


def test_no_whole_parameter_is_in_memory_of_a_program():
    activations = 2 * LAYERS * 4 * WIDTH * 4
    for held in on_mesh(2, in_shared_memory, train, "parameters"):
        assert held["parameters"] == LAYERS * BLOCK_BYTES // 2
        # Two gradients that are being summed with the backend's copies, and one that is being computed.
        assert held["peak"] <= 5 * BLOCK_BYTES + activations, held["peak"] / BLOCK_BYTES


def list_shared_files() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "rankless" in name}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_killed_worker_leaves_no_memory_and_no_hang(tmp_path: Path):
    (tmp_path / "train.py").write_text(KILLED)
    before = list_shared_files()
    done = rankless("run", "-n", "2", "train.py", folder=tmp_path)
    assert done.returncode == 128 + signal.SIGKILL, done.stdout + done.stderr
    assert list_shared_files() <= before

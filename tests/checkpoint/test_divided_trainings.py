"""Checkpoints of states that are divided between workers: they continue under any division, as on one device."""

import gc
import weakref

import pytest
import torch
from checkpoint.divided_trainings import (
    SOLO,
    TRAININGS,
    Training,
    continue_training,
    save_training,
    train_plainly,
)
from support.processes import on_mesh
from support.warm_runs import rankless

from rankless.checkpoint import load
from rankless.errors import CheckpointError
from rankless.jobs.job import divide_states_of_jobs

pytestmark = pytest.mark.usefixtures("one_thread")
ONCE = """
import torch, rankless
model = torch.nn.Linear(3, 2)
try:
    rankless.once(lambda: rankless.OPERATION("c", model=model))
except rankless.errors.RanklessError as error:
    print(error)
"""


def require_equal(found, wanted, bound=1e-12):
    assert len(found) == len(wanted)
    for place, (ours, plain) in enumerate(zip(found, wanted, strict=True)):
        assert (ours.shape, ours.dtype) == (plain.shape, plain.dtype), place
        if ours.numel():
            off = float((ours - plain).abs().max()) / max(1.0, float(plain.abs().max()))
            assert off <= bound, f"value {place} is off by {off:.3g}"


def run(workers, function, *arguments):
    return [function(SOLO, *arguments)] if workers == 1 else on_mesh(workers, function, *arguments)


def save(path, workers, name, zero, layout, background=False):
    return run(workers, save_with, path, name, zero, layout, background)


def save_with(mesh, path, name, zero, layout, background):
    return save_training(mesh, path, name, zero, layout=layout, background=background)


def resume(path, workers, name, zero, *arguments):
    return run(workers, continue_training, path, name, zero, torch.float64, *arguments)


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("name", ["perceptron", "adafactor", "odd_shapes"])
def test_a_training_continues_as_on_one_device(tmp_path, name):
    wanted = train_plainly(name, 4)
    for found in save(tmp_path / "c", 3, name, "parameters", "sharded"):
        require_equal(found, wanted)
    for workers, zero, deferred in ((1, None, False), (2, "parameters", False), (2, "optimizer", True)):
        for found in resume(tmp_path / "c", workers, name, zero, deferred):
            require_equal(found, wanted)


def continue_in_bfloat16(mesh, path, layout):
    """Return the values of a training that was interrupted, and of one that was not."""
    wanted = save_training(mesh, path, "perceptron", "parameters", torch.bfloat16, layout=layout)
    return wanted, continue_training(mesh, path, "perceptron", "parameters", torch.bfloat16)


@pytest.mark.parametrize("layout", ["sharded", "whole"])
def test_a_training_in_bfloat16_continues_bit_for_bit(tmp_path, layout):
    for wanted, found in on_mesh(2, continue_in_bfloat16, tmp_path / "c", layout):
        assert all(map(torch.equal, found, wanted))


def load_what_does_not_fit(mesh, path):
    """Load into a model with another last layer. Return the error, and whether the values are as they were."""
    training = Training(mesh, "perceptron", "parameters", seed=11)
    before = [item.detach().clone() for item in training.model.parameters()]
    training.model[5].bias = torch.nn.Parameter(torch.zeros(9))
    try:
        load(path, {"model": training.model}, mesh=mesh, owner=training.world.owner)
    except CheckpointError as error:
        return str(error), all(map(torch.equal, list(training.model.parameters())[:-1], before))
    return None


def test_a_divided_state_that_does_not_fit_changes_nothing(tmp_path):
    save(tmp_path / "c", 2, "perceptron", "parameters", "sharded")
    for error, is_same in on_mesh(2, load_what_does_not_fit, tmp_path / "c"):
        assert "model.5.bias: (4,) saved, (9,) here" in error
        assert is_same


def test_an_optimizer_does_not_keep_its_jobs():
    training = Training(SOLO, "perceptron", None)
    job, optimizer = weakref.ref(training.job), training.optimizers[0]
    del training
    gc.collect()
    assert job() is None
    divide_states_of_jobs([optimizer])


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("operation", ["save", "load"])
def test_a_checkpoint_within_once_is_refused(tmp_path, operation):
    script = tmp_path / "script.py"
    script.write_text(ONCE.replace("OPERATION", operation))
    done = rankless("run", "-n", "2", "-q", str(script), folder=tmp_path)
    assert f"rankless.{operation}, in which all ranks must take part" in done.stdout, done.stdout + done.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("layout", ["sharded", "whole"])
@pytest.mark.parametrize("name", TRAININGS)
def test_every_training_continues_under_every_division(tmp_path, name, layout, background):
    wanted = train_plainly(name, 4)
    for found in save(tmp_path / "c", 3, name, "parameters", layout, background):
        require_equal(found, wanted)
    for workers, zero, deferred, divide_first, called in (
        *((1, None, False, True, 0), (2, "parameters", False, True, 0), (2, "optimizer", False, False, 0)),
        *((3, "parameters", False, True, 1), (2, "gradients", True, True, 0), (3, "parameters", True, True, 0)),
        *((2, None, False, True, 1), (4, "parameters", True, False, 0)),
    ):
        for found in resume(tmp_path / "c", workers, name, zero, deferred, divide_first, called):
            require_equal(found, wanted)

"""Checkpoints of states that are divided between workers: they continue under any division, as on one device."""

import pytest
import torch
from checkpoint.divided_trainings import SOLO, TRAININGS, continue_training, save_training, train_plainly
from support.processes import on_mesh

pytestmark = pytest.mark.usefixtures("one_thread")
ZEROS = (None, "optimizer", "gradients", "parameters")


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


@pytest.mark.parametrize("name", ["perceptron", "adafactor", "odd_shapes"])
def test_a_training_continues_as_on_one_device(tmp_path, name):
    wanted = train_plainly(name, 4)
    for found in save(tmp_path / "c", 3, name, "parameters", "sharded"):
        require_equal(found, wanted)
    for workers, zero, deferred in ((1, None, False), (2, "parameters", False), (2, "optimizer", True)):
        for found in resume(tmp_path / "c", workers, name, zero, deferred):
            require_equal(found, wanted)


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

"""What a rank holds in memory while divided states are saved and loaded: its pieces, and at most one whole tensor."""

import copy

import pytest
import torch
from checkpoint.divided_trainings import SOLO, TRAININGS, Training
from support.live_memory import LiveMemoryMode
from support.processes import on_mesh
from torch import nn

from rankless.checkpoint import SaveOptions, load
from rankless.deferred_models.deferred_tensor import DeferredTensor
from rankless.jobs.memory_meter import count_local_bytes
from rankless.jobs.views import captured
from rankless.ownership.partitioned_tensor import find_partition

pytestmark = pytest.mark.usefixtures("one_thread")
LAYERS, WIDTH = 12, 256
BLOCK = WIDTH * WIDTH * 4
PARAMETERS = LAYERS * BLOCK
WHOLE = 3 * PARAMETERS
"""The bytes of parameters and of AdamW's two states."""
SMALL = BLOCK // 4
"""For scalars, states of generators and the like."""


def large():
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    return model, [torch.optim.AdamW(model.parameters(), lr=1e-3)], lambda x: model(x).square().mean()


def make_training(mesh, zero, **options):
    TRAININGS["large"] = large
    return Training(mesh, "large", zero, **options)


def train(training):
    for _ in range(2):
        training.job(torch.ones(4, WIDTH))


def measure_saves(mesh, path):
    """Return the bytes that saves allocate, at most, by layout and whether they are in the background."""
    training, peaks = make_training(mesh, "parameters"), {}
    train(training)
    for layout in ("sharded", "whole"):
        for background in (False, True):
            with LiveMemoryMode() as meter:
                training.saver.save(path / layout, training.objects, options=options_of(layout, background))
            training.saver.wait()
            peaks[layout, background] = meter.peak_bytes
    return peaks


def options_of(layout, background):
    return SaveOptions(layout=layout, background=background)


def test_a_save_holds_at_most_one_whole_tensor_besides_pieces(tmp_path):
    for peaks in on_mesh(2, measure_saves, tmp_path):
        # An empty tensor of the whole shape stands for each divided one: its memory is freed before it is used.
        assert peaks["sharded", False] <= BLOCK + SMALL
        # Gloo's threads may hold the memory of the two gathers before a moment longer.
        assert peaks["whole", False] <= 4 * BLOCK + SMALL
        assert peaks["whole", True] <= 4 * BLOCK + SMALL
        assert WHOLE // 2 <= peaks["sharded", True] <= WHOLE // 2 + BLOCK + SMALL


def count_held(training):
    states = [value for item in training.optimizers for entries in item.state.values() for value in entries.values()]
    return sum(map(count_local_bytes, [*training.model.parameters(), *states]))


def measure_load(mesh, path, zero, deferred, is_called):
    """Return the bytes that a load allocates at most, those that stay, and those of the states then."""
    with LiveMemoryMode() as meter:
        training = make_training(mesh, zero, seed=11, deferred=deferred)
        if is_called:
            train(training)
            training.optimizers[0].state.clear()
        before, meter.peak_bytes = meter.live_bytes, 0
        training.load(path)
        peak, after = meter.peak_bytes, meter.live_bytes
    for parameter in training.model.parameters():
        assert (find_partition(parameter) is not None) == (zero == "parameters" and mesh.size > 1)
    return before, peak, after, count_held(training)


def measure_deferred_division(mesh, path):
    """Return the most bytes of parameters that have values, each time that one is about to be computed."""
    training, found = make_training(mesh, "parameters", deferred=True), []
    compute = captured.materialize_tensors

    def materialize_tensors(tensors):
        parameters = [item for item in training.model.parameters() if not isinstance(item, DeferredTensor)]
        found.append(sum(map(count_local_bytes, parameters)))
        compute(tensors)

    captured.materialize_tensors = materialize_tensors
    try:
        training.load(path)
    finally:
        captured.materialize_tensors = compute
    return found


def test_a_deferred_model_is_computed_and_divided_tensor_by_tensor(tmp_path):
    on_mesh(2, measure_saves, tmp_path)
    for found in on_mesh(2, measure_deferred_division, tmp_path / "sharded"):
        assert found == [number * BLOCK // 2 for number in range(LAYERS)]


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("layout", ["sharded", "whole"])
def test_a_load_reads_pieces_and_at_most_one_whole_tensor(tmp_path, layout):
    on_mesh(2, measure_saves, tmp_path)
    path = tmp_path / layout
    for before, peak, after, held in on_mesh(2, measure_load, path, "parameters", False, True):
        assert held <= WHOLE / 2 + SMALL
        assert after <= before + PARAMETERS + SMALL  # the pieces of two states
        assert peak <= before + PARAMETERS + 2 * BLOCK + SMALL
    for before, peak, after, held in on_mesh(3, measure_load, path, "parameters", False, False):
        assert before == PARAMETERS
        assert held <= WHOLE / 3 + BLOCK
        assert after <= WHOLE / 3 + BLOCK
        assert peak <= max(PARAMETERS + PARAMETERS / 3, WHOLE / 3) + 2 * BLOCK + SMALL
    for _, peak, after, held in on_mesh(3, measure_load, path, "parameters", True, False):
        assert held <= WHOLE / 3 + BLOCK
        assert after <= WHOLE / 3 + BLOCK
        assert peak <= WHOLE / 3 + 3 * BLOCK
    for _, peak, _, held in on_mesh(2, measure_load, path, "optimizer", False, False):
        assert held <= PARAMETERS + PARAMETERS + SMALL
        # Until its first step, a worker has a copy of its rows of each parameter for the optimizer.
        assert peak <= PARAMETERS + PARAMETERS / 2 + PARAMETERS + 2 * BLOCK + SMALL
    before, peak, _, held = measure_load(SOLO, path, None, False, False)
    assert WHOLE <= held <= WHOLE + SMALL
    assert peak <= before + 2 * PARAMETERS + BLOCK + SMALL


class Trainer:
    """Saves and loads a model, its average and an optimizer, as scripts do."""

    def __init__(self, training):
        self.training = training
        self.average = copy.deepcopy(training.model)
        self.best = training.model.state_dict()

    def state_dict(self):
        return {
            "model": self.training.model.state_dict(),
            "average": self.average.state_dict(),
            "best": self.best,
            "first": self.training.model[0].weight.detach().clone(),
            "optimizer": self.training.optimizers[0].state_dict(),
        }

    def load_state_dict(self, state):
        self.training.model.load_state_dict(state["model"])
        self.average.load_state_dict({key: value * 1.0 for key, value in state["average"].items()})
        self.best = state["best"]
        self.first = state["first"]
        self.training.optimizers[0].load_state_dict(state["optimizer"])


def train_within_object(mesh, path, zero, action):
    """Save or load an object of the script that has models and an optimizer in it; then go on. Return all values."""
    torch.set_default_dtype(torch.float64)
    try:
        training = Training(mesh, "perceptron", zero, seed=3 if action == "save" else 11)
        training.train(0, 1)
        trainer = Trainer(training)
        objects = {"trainer": trainer}
        if action == "save":
            training.train(1, 2)
            training.saver.save(path, objects, options=options_of("sharded", False))
        else:
            load(path, objects, mesh=mesh, owner=training.world.owner)
            assert type(trainer.first) is torch.Tensor
        training.train(2, 4)
        values = [item.detach().clone() for item in (*trainer.average.parameters(), *trainer.best.values())]
        return [*training.show(), *(values if action == "load" else [])]
    finally:
        torch.set_default_dtype(torch.float32)


def test_an_object_with_models_in_it_is_restored_under_another_division(tmp_path):
    saved = on_mesh(3, train_within_object, tmp_path / "c", "parameters", "save")[0]
    one_device = train_within_object(SOLO, tmp_path / "c", None, "load")
    for zero in ("parameters", "optimizer"):
        for found in on_mesh(2, train_within_object, tmp_path / "c", zero, "load"):
            assert all(torch.allclose(one, two, rtol=0, atol=1e-12) for one, two in zip(found, saved, strict=False))
            assert all(torch.allclose(one, two, rtol=0, atol=1e-12) for one, two in zip(found, one_device, strict=True))

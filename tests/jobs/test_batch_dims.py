"""Batch dims of arguments, named by the script or not: the result is the same."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from exactness import Scenario, Script, Step, assert_exact, sample_cases
from support.processes import on_mesh
from torch import nn
from torch.utils import _pytree as pytree

from rankless.context.world import World
from rankless.data.logical_tensor import GatherMonitor, LogicalTensor
from rankless.errors import ConfigError, DataError
from rankless.jobs.job import make_job
from rankless.parallel.tensor_placement import Replicate, Shard, split_lengths

CLASSES = 6


def make_silent_world(mesh):
    return World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None)


def make_script(model, loss):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Script(modules={"model": model}, steps=[Step(function=loss, optimizer=optimizer)])


def weighted_classes():
    model = nn.Linear(4, CLASSES)
    return make_script(model, lambda x, labels, weights: F.cross_entropy(model(x), labels, weight=weights))


def weighted_batch(rows):
    return torch.randn(rows, 4), torch.randint(CLASSES, (rows,)), torch.rand(CLASSES) + 0.5


def points_and_centres():
    model = nn.Linear(4, 3, bias=False)

    def loss(x, centres):
        distances = (model(x)[:, None] - model(centres)[None]).square().sum(2)
        return distances.min(1)[0].mean() + 0.1 * distances.min(0)[0].mean(), distances.argmin(1)

    return make_script(model, loss)


def points(rows):
    return torch.randn(rows, 4), torch.randn(5, 4)


Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Sample:
    pair: Pair
    extra: dict


pytree.register_dataclass(Sample)


def nested():
    model = nn.Linear(4, 3)

    def loss(sample, scale, nothing, *, name):
        left, right = model(sample.pair.left), model(sample.pair.right)
        weight = sample.extra["deep"][0]["weight"]
        total = ((left - right).square().mean(1) * weight).mean() * scale
        return {"loss": total, "name": name, "nothing": nothing, "pair": Pair(left, scale)}

    return make_script(model, loss)


def nested_batch(rows):
    pair = Pair(torch.randn(rows, 4), torch.randn(rows, 4))
    deep = [{"weight": torch.rand(rows)}, None, "text"]
    return {"sample": Sample(pair, {"deep": deep}), "scale": 2.5, "nothing": None, "name": "left"}


SCENARIOS = [
    Scenario(build=weighted_classes, batch=weighted_batch),
    Scenario(build=points_and_centres, batch=points),
    Scenario(build=nested, batch=nested_batch),
]


@pytest.mark.ci_sample(2)
@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "workers", "dtype"), sample_cases(SCENARIOS, 2, 3))
def test_other_first_dims_plain_values_and_pytrees_train_exactly(scenario, workers, dtype):
    assert_exact(scenario, workers, dtype)


def time_first_loss(model, tokens, mask):
    """Tokens are (length, rows), the mask (length, length)."""
    hidden = model(F.one_hot(tokens, 4).to(mask.dtype))
    return (torch.einsum("trc,ts->src", hidden, mask).square().mean((0, 2))).mean()


def train_with_batch_dims(mesh, batch_dims, rows):
    """Return loss and gradient of one call, the placements of its arguments, and its redistributions."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(tokens, mask):
        return time_first_loss(model, tokens, mask)

    job = make_job(train, model=model, optimizer=optimizer, view="consistent", world=lambda: make_silent_world(mesh))
    if batch_dims is not None:
        job.configure(batch_dims)
    loss = job(torch.randint(4, (5, rows)), torch.rand(5, 5).double())
    ((executable,),) = next(iter(job._views.view._programs._entries.values())).by_shapes.values()
    placements = {
        given.index: str(executable.local.sharded.sharding(node)[0])
        for node, given in executable.captured.program.inputs.items()
        if given.kind == "argument"
    }
    return loss, model.weight.grad.clone(), placements, [move.kind for move in executable.local.collectives]


@pytest.mark.parametrize("workers", [2, 3])
def test_batch_dims_change_placements_and_no_results(workers):
    rows = 7
    batch_dims = {"tokens": 1, "mask": None}
    for marked, plain in zip(
        on_mesh(workers, train_with_batch_dims, batch_dims, rows),
        on_mesh(workers, train_with_batch_dims, None, rows),
        strict=True,
    ):
        assert torch.allclose(marked[0], plain[0], rtol=1e-13)
        assert torch.allclose(marked[1], plain[1], rtol=1e-12)
        assert marked[2] == {0: str(Shard(1, split_lengths(rows, workers))), 1: str(Replicate())}
        assert set(marked[3]) == {"all_reduce"}, "with the batch named nothing but sums need move"
        assert plain[2] == dict.fromkeys((0, 1), str(Shard(0, split_lengths(5, workers))))


def collect_name_errors(mesh):
    def train(images, *more, scale=1.0):
        return images, more, scale

    messages = []
    for batch_dims in ({"image": 1}, {"images": -1}, {"images": True}):
        job = make_job(
            train, model=nn.Linear(2, 2), optimizer=None, view="consistent", world=lambda: make_silent_world(mesh)
        )
        with pytest.raises(ConfigError) as refusal:
            job.configure(batch_dims)
        messages.append(str(refusal.value))
    return messages


def test_unknown_names_and_dims_raise_at_decoration():
    for unknown, negative, boolean in on_mesh(2, collect_name_errors):
        assert "images, more, scale" in unknown
        assert "'image'" in unknown
        assert "-1" in negative
        assert "True" in boolean


def contradict_loader(mesh):
    model = nn.Linear(4, 3)
    placement = Shard(0, split_lengths(6, mesh.size))
    local = torch.ones(placement.lengths[mesh.rank], 4)
    batch = LogicalTensor(local, placement=placement, mesh=mesh, monitor=GatherMonitor(lambda _: None))
    found = []
    for dim in (1, None):
        job = make_job(
            lambda x: model(x).sum(),
            model=model,
            optimizer=None,
            view="consistent",
            world=lambda: make_silent_world(mesh),
        )
        job.configure({"x": dim})
        with pytest.raises(DataError) as refusal:
            job(batch)
        found.append(str(refusal.value))
    job.configure({"x": 0})
    return found, job(batch)


@pytest.mark.parametrize("workers", [2, 3])
def test_batch_dims_that_contradict_a_loaders_batch_raise(workers):
    for (by_one, by_none), result in on_mesh(workers, contradict_loader):
        assert "batch_dims= with 1" in by_one
        assert "batch_dims= with None" in by_none
        assert result.dim() == 0


def describe_variadic_placements(mesh):
    model = nn.Linear(4, 3)
    warnings = []

    def predict(x, *others, **named):
        return model(x).sum() + sum(other.sum() for other in others) + named["extra"].sum()

    job = make_job(predict, model=model, optimizer=None, view="consistent", world=lambda: make_silent_world(mesh))
    job.configure({"others": 1, "extra": None})
    job(torch.ones(6, 4), torch.ones(2, 6), torch.ones(2, 6), extra=torch.ones(6))
    ((executable,),) = next(iter(job._views.view._programs._entries.values())).by_shapes.values()
    inputs = executable.captured.program.inputs
    return warnings, [
        str(executable.local.sharded.sharding(node)[0]) for node, given in inputs.items() if given.kind == "argument"
    ]


def test_a_batch_dim_of_variadic_arguments_applies_to_each():
    lengths = split_lengths(6, 2)
    for _, placements in on_mesh(2, describe_variadic_placements):
        assert placements == [*map(str, (Shard(0, lengths), Shard(1, lengths), Shard(1, lengths), Replicate()))]

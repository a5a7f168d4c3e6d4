"""The mirrored view: lists with one element per device, the same training on one worker and on several."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.processes import on_mesh
from torch import Tensor, nn

from rankless.context.world import World
from rankless.errors import ConfigError
from rankless.jobs.job import make_job
from rankless.jobs.job_definition import StepOptions
from rankless.jobs.views.mirrored import LocalArgument
from rankless.parallel.mesh import Mesh

STEPS = 6


def make_world(mesh: Mesh) -> World:
    return World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None)


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.norm = nn.BatchNorm1d(8) if kind == "norm" else nn.Identity()
        self.dropout = nn.Dropout(0.5 if kind == "dropout" else 0.0)
        self.last = nn.Linear(8, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(torch.relu(self.norm(self.first(x)))))


def batch(number: int, rows: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(number)
    x = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (rows,), generator=generator)


def make_model(kind: str) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net(kind).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def get_state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def train_mirrored(mesh: Mesh, kind: str, reduction: str, pieces: list[int]) -> tuple[list[Any], dict[str, Tensor]]:
    """Return every step's results, and the final state."""
    model, optimizer = make_model(kind)

    def loss(x: Tensor, y: Tensor, weight: float, *, name: str) -> Any:
        values = F.cross_entropy(model(x), y, reduction=reduction) * weight
        # Any Python: a branch on a value, and a result that is none.
        return {"loss": values, "high": bool(values.mean().item() > 1.0), "name": name}

    job = make_job(loss, model=model, optimizer=optimizer, view="mirrored", world=lambda: make_world(mesh))
    results = []
    for number in range(STEPS):
        x, y = batch(number, sum(pieces))
        results.append(job(list(x.split(pieces)), list(y.split(pieces)), 0.5, name="step"))
    return results, get_state(model)


def train_plainly(pieces: list[int]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Train on the whole batch at once."""
    model, optimizer = make_model("plain")
    losses = []
    for number in range(STEPS):
        x, y = batch(number, sum(pieces))
        values = F.cross_entropy(model(x), y, reduction="none") * 0.5
        optimizer.zero_grad()
        values.mean().backward()
        optimizer.step()
        losses.append(values.detach())
    return losses, get_state(model)


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("pieces", [[6, 6], [7, 5], [4, 4, 4], [1, 6, 5]])
def test_losses_per_sample_train_as_the_whole_batch_on_any_workers(pieces: list[int]):
    losses, wanted = train_plainly(pieces)
    runs = [
        train_mirrored(Mesh.solo(), "plain", "none", pieces),
        *on_mesh(len(pieces), train_mirrored, "plain", "none", pieces),
    ]
    for results, final in runs:
        for result, whole in zip(results, losses, strict=True):
            assert [device["name"] for device in result] == ["step"] * len(pieces)
            assert [len(device["loss"]) for device in result] == pieces
            torch.testing.assert_close(torch.cat([device["loss"] for device in result]), whole, rtol=1e-12, atol=0)
        assert_close(final, wanted)


@pytest.mark.parametrize("kind", ["plain", "dropout", "norm"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.ci_sample(2)
def test_one_worker_with_every_element_trains_as_many_workers(size: int, kind: str):
    pieces = [4] * size
    results, wanted = train_mirrored(Mesh.solo(), kind, "mean", pieces)
    for found, final in on_mesh(size, train_mirrored, kind, "mean", pieces):
        for ours, plain in zip(found, results, strict=True):
            for device, other in zip(ours, plain, strict=True):
                torch.testing.assert_close(device["loss"], other["loss"], rtol=1e-12, atol=0)
                assert device["high"] == other["high"]
        assert_close(final, wanted)


def predict_on_mesh(mesh: Mesh, own: bool) -> list[Any]:
    model, _ = make_model("plain")
    job = make_job(
        lambda x, y: (model(x).argmax(1) == y).sum(),
        model=model,
        optimizer=None,
        view="mirrored",
        world=lambda: make_world(mesh),
    )
    x, y = batch(3)
    parts = list(x.chunk(2)), list(y.chunk(2))
    found = job(LocalArgument(parts[0][mesh.rank]), LocalArgument(parts[1][mesh.rank])) if own else job(*parts)
    assert not any(tensor.requires_grad for tensor in found)
    return found


def test_a_predict_job_returns_the_results_of_all_devices():
    model, _ = make_model("plain")
    x, y = batch(3)
    wanted = [(model(part).argmax(1) == label).sum() for part, label in zip(x.chunk(2), y.chunk(2), strict=True)]
    for own in (False, True):
        assert on_mesh(2, predict_on_mesh, own) == [wanted] * 2
    assert predict_on_mesh(Mesh.solo(), False) == wanted


def call_with_lists(mesh: Mesh, lengths: list[int]) -> Any:
    model, optimizer = make_model("plain")
    job = make_job(
        lambda x, y: F.cross_entropy(model(x), y),
        model=model,
        optimizer=optimizer,
        view="mirrored",
        world=lambda: make_world(mesh),
    )
    x, y = batch(0)
    return job(*(list(tensor.chunk(length)) for tensor, length in zip((x, y), lengths, strict=True)))


@pytest.mark.parametrize("lengths", [[3, 3], [2, 1], [1, 2]])
def test_lists_that_do_not_fit_the_devices_raise_before_the_job_runs(lengths: list[int]):
    with pytest.raises(ConfigError, match="lists of length 2, the number of devices") as raised:
        on_mesh(2, call_with_lists, lengths)
    assert "one element per device" in str(raised.value)


def test_on_one_worker_lists_of_different_lengths_raise():
    with pytest.raises(ConfigError, match="lists of equal length"):
        call_with_lists(Mesh.solo(), [2, 3])


def test_accumulation_in_the_mirrored_view_and_unknown_views_raise():
    model, optimizer = make_model("plain")
    job = make_job(
        lambda x: model(x).sum(),
        model=model,
        optimizer=optimizer,
        view="mirrored",
        world=lambda: make_world(Mesh.solo()),
        step_options=StepOptions(accumulate=2),
    )
    with pytest.raises(ConfigError, match="in the mirrored view"):
        job([batch(0)[0]])
    with pytest.raises(ConfigError, match='view="consistent" or view="mirrored"'):
        make_job(lambda x: x, model=model, optimizer=None, view="local", world=lambda: make_world(Mesh.solo()))

"""Every value of one job call, recorded on one device and on several without changing the training."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.processes import on_mesh
from torch import Tensor, nn

from rankless.config.run_config import InspectedCall
from rankless.context.world import RunSettings, World
from rankless.jobs.job import Job, make_job
from rankless.parallel.mesh import Mesh
from rankless.records.verify_recording_format import read_values
from rankless.verify.first_differing_value import FirstDifferingValue, find_first_value, render_first_value
from rankless.verify.recording.value_probes import ValueInspector

pytestmark = pytest.mark.slow

CALL = InspectedCall(job="train", call=2)


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.1, batch_first=True)
        self.words = nn.Embedding(7, 16)
        self.last = nn.Linear(16, 5)

    def forward(self, images: Tensor, words: Tensor) -> Tensor:
        features = F.max_pool2d(F.relu(self.norm(self.convolution(images))), 2)
        return self.last(self.layer(features.flatten(2) + self.words(words)).mean(dim=1))


def train_job(world: World, fault: str) -> Job[..., Tensor]:
    torch.manual_seed(0)
    model = Pictures().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(images: Tensor, words: Tensor, labels: Tensor, keep: Tensor) -> Tensor:
        scores = model(images, words)
        if fault == "capture" and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL):
            scores = scores * 1.5
        return F.cross_entropy(scores, labels) + 0 * keep.sum()

    return make_job(train, model=model, optimizer=optimizer, view="consistent", world=lambda: world)


def batch(step: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(7, 1, 8, 8, generator=generator, dtype=torch.float64)
    words = torch.randint(0, 7, (7, 4), generator=generator)
    return images, words, torch.randint(0, 5, (7,), generator=generator), torch.rand(7, generator=generator) > 0.5


def trained(mesh: Mesh, folder: str, fault: str, noise: int | None) -> list[float]:
    """Train three steps and return the losses; inspect the second step if there is a folder."""
    inspector = ValueInspector(folder, mesh.rank, CALL) if folder else None
    world = World(
        mesh=mesh,
        notify=lambda _text: None,
        send_record=lambda _record: None,
        settings=RunSettings(inspector=inspector, perturbation_seed=noise),
    )
    job = train_job(world, fault)
    losses = []
    for step in range(3):
        images, words, labels, keep = batch(step)
        if fault == "batch" and mesh.size > 1 and step == 1:
            images = images * 2
        losses.append(job(images, words, labels, keep).item())
    return losses


def found(tmp_path: Path, workers: int, fault: str) -> FirstDifferingValue | None:
    one, noise, many = str(tmp_path / "one"), str(tmp_path / "noise"), str(tmp_path / "many")
    solo = Mesh.solo()
    assert trained(solo, one, fault, None) == trained(solo, "", fault, None)
    trained(solo, noise, fault, 1)
    inspected = on_mesh(workers, trained, many, fault, None)
    assert inspected == on_mesh(workers, trained, "", fault, None)
    everyone = [list(read_values(many, rank)) for rank in range(workers)]
    return find_first_value(list(read_values(one, 0)), everyone, list(read_values(noise, 0)), call=CALL)


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_an_inspected_correct_call_has_equal_values_and_trains_the_same(tmp_path: Path, workers: int) -> None:
    first = found(tmp_path, workers, "")
    assert first is not None
    assert first.fault == "after", render_first_value(first)
    values = list(read_values(str(tmp_path / "many"), workers - 1))
    assert sum(value.role == "value" for value in values) > 60
    assert {value.line.rpartition("/")[2].partition(":")[0] for value in values} == {Path(__file__).name}
    assert {"input", "value", "output"} == {value.role for value in values}
    names = {value.name: value for value in values}
    assert names["argument 0"].shape == (7, 1, 8, 8)
    assert names["argument 3"].dtype == "bool"
    assert "gradient of model.convolution.weight" in names


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_a_different_batch_is_the_first_difference_with_its_line(tmp_path: Path, workers: int) -> None:
    first = found(tmp_path, workers, "batch")
    assert first is not None
    assert (first.fault, first.name) == ("input", "argument 0")
    file, _, number = first.line.rpartition(":")
    assert file == Path(__file__).name
    assert "job(images" in Path(__file__).read_text().splitlines()[int(number) - 1]


def test_a_program_that_differs_from_the_plain_call_is_a_capture_fault(tmp_path: Path) -> None:
    first = found(tmp_path, 2, "capture")
    assert first is not None
    assert first.fault == "capture"
    assert "the capture is at fault" in render_first_value(first)

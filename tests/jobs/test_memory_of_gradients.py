"""Gradients on a mesh have their parameters' strides and memory of their own: clipping and fused steps are exact."""

import pytest
import torch
import torch.nn.functional as F
from support.processes import on_mesh
from torch import nn

from rankless.context.world import World
from rankless.jobs.job import make_job
from rankless.jobs.job_definition import StepOptions
from rankless.parallel.mesh import Mesh

STEPS = 3


def make_convolutions():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.Flatten(), nn.Linear(32, 4))
    return model.double().to(memory_format=torch.channels_last)


class SharedGradients(nn.Module):
    """Two biases with the same gradient, and a weight whose gradient is one number repeated."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.Sequential(nn.Flatten(), nn.Linear(192, 4)).double()
        self.first, self.second = (nn.Parameter(torch.randn(4).double()) for _ in range(2))
        self.summed = nn.Parameter(torch.randn(3, 5).double())

    def forward(self, images):
        return (self.inner(images) + self.first + self.second) * (1 + self.summed.sum())


def make_batches():
    torch.manual_seed(4)
    return [(torch.randn(5, 3, 8, 8).double(), torch.randint(0, 4, (5,))) for _ in range(STEPS)]


OPTIMIZERS = {
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
}


def train_job(mesh, make_model, optimizer, clip):
    model = make_model()
    world = World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None)
    job = make_job(
        lambda images, labels: F.cross_entropy(model(images), labels) * 10,
        model=model,
        optimizer=OPTIMIZERS[optimizer](model.parameters()),
        view="consistent",
        world=lambda: world,
        step_options=StepOptions(clip_norm=clip),
    )
    for batch in make_batches():
        job(*batch)
    grads = [(item.grad.stride(), item.grad.untyped_storage().data_ptr(), item.grad) for item in model.parameters()]
    assert [stride for stride, _, _ in grads] == [item.stride() for item in model.parameters()]
    places = [(item.data_ptr(), item.data_ptr() + item.nbytes) for _, _, item in grads]
    assert all(end <= start for (_, end), (start, _) in zip(sorted(places), sorted(places)[1:], strict=False))
    return [item.detach() for item in model.parameters()]


def train_plainly(make_model, optimizer, clip):
    model = make_model()
    plain = OPTIMIZERS[optimizer](model.parameters())
    for images, labels in make_batches():
        plain.zero_grad()
        (F.cross_entropy(model(images), labels) * 10).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        plain.step()
    return [item.detach() for item in model.parameters()]


@pytest.mark.ci_sample(2)
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("make_model", [make_convolutions, SharedGradients])
def test_a_training_on_two_workers_equals_the_plain_one(make_model, optimizer, clip):
    expected = train_plainly(make_model, optimizer, clip)
    for found in on_mesh(2, train_job, make_model, optimizer, clip):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def means_in_half_precision(mesh):
    model = nn.Linear(6, 4)
    nn.init.constant_(model.weight, 0.5)
    model.to(torch.float16)
    world = World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None)

    def measure(features):
        wide = model(features).repeat(1, 20000).abs() + 3
        large = features.sum(1) * 40000  # large numbers of both signs, whose parts are too large to add
        return wide.mean(), wide.var(), wide.mean(0).mean(), (large * torch.tensor([1, 1, -1, -1]).half()).sum()

    job = make_job(measure, model=model, optimizer=None, view="consistent", world=lambda: world)
    return [item.clone() for item in job(torch.ones(4, 6).half() / 6)]


def test_half_precision_accumulates_as_in_plain_pytorch():
    expected = means_in_half_precision(Mesh.solo())
    assert all(item.isfinite() for item in expected)
    for found in on_mesh(2, means_in_half_precision):
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=0)


def run_with_history(mesh, as_parameter):
    torch.manual_seed(4)
    model, encoder = nn.Linear(6, 4).double(), nn.Linear(6, 6).double()
    notices = []
    world = World(mesh=mesh, notify=notices.append, send_record=lambda _: None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = make_job(
        lambda batch: model(batch["features"]).mean() + batch["scale"].sum(),
        model=model,
        optimizer=optimizer,
        view="consistent",
        world=lambda: world,
    )
    scale = model.weight if as_parameter else torch.ones(2)
    features = torch.ones(4, 6).double()
    job({"features": features if as_parameter else encoder(features), "scale": scale})
    gradients = [item.grad for item in (*model.parameters(), *encoder.parameters())]
    return notices, [None if item is None else item.clone() for item in gradients]


@pytest.mark.parametrize(("as_parameter", "name"), [(False, "features"), (True, "scale")])
def test_a_gradient_that_flows_out_of_the_job_is_that_of_one_device(as_parameter, name):
    (notice,), expected = run_with_history(Mesh.solo(), as_parameter)
    assert f"argument batch['{name}'] requires a gradient" in notice
    assert "several workers cannot run this as one program" in notice
    for (first, *_), gradients in on_mesh(2, run_with_history, as_parameter):
        assert f"argument batch['{name}'] requires a gradient" in first
        torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-12)

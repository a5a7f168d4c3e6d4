"""Typed placeholders: an argument that does not fit raises before the job runs, with the fix."""

from typing import Annotated, Any

import numpy
import pytest
import torch
from support.processes import on_mesh
from torch import Tensor, nn

from rankless.context.world import RunSettings, World
from rankless.errors import ConfigError, DataError
from rankless.jobs.declared_argument_shapes import PerDevice, Whole
from rankless.jobs.job import make_job
from rankless.jobs.views.mirrored import LocalArgument
from rankless.parallel.mesh import Mesh
from rankless.user_code import display_name

IMAGES = Whole((4, None), torch.float32)
LABELS = Whole((4,), torch.int64)


def make_world(mesh: Mesh) -> World:
    return World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None)


def make_whole_job(mesh: Mesh) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)

    def score(images: Annotated[Tensor, IMAGES], labels: Annotated[Tensor, LABELS], scale: float = 1.0) -> Tensor:
        return (model(images).argmax(1) == labels).sum() * scale

    return make_job(score, model=model, optimizer=None, view=None, world=lambda: make_world(mesh))


def make_device_job(mesh: Mesh, view: str | None = None) -> Any:
    model = nn.Linear(3, 2)

    def score(images: Annotated[Tensor, PerDevice((None, 3), torch.float32)]) -> Tensor:
        return model(images).sum()

    return make_job(score, model=model, optimizer=None, view=view, world=lambda: make_world(mesh))


def call_whole_job(mesh: Mesh) -> float:
    images = numpy.arange(12, dtype="float32").reshape(4, 3)
    return float(make_whole_job(mesh)(images, labels=torch.tensor([0, 1, 0, 1])))


def test_fitting_arrays_and_tensors_are_accepted_on_any_workers():
    wanted = call_whole_job(Mesh.solo())
    assert on_mesh(2, call_whole_job) == [wanted] * 2


WRONG = {
    "shape": ((torch.ones(5, 3), torch.ones(4).long()), "images of shape [4, any]", "shape [5, 3]", "None stands"),
    "dims": ((torch.ones(4), torch.ones(4).long()), "images of shape [4, any]", "shape [4]", "None stands"),
    "int32 labels": (
        (torch.ones(4, 3), torch.ones(4, dtype=torch.int32)),
        "labels of dtype int64",
        "int32",
        "to(torch.int64)",
    ),
    "int32 labels of NumPy": (
        (torch.ones(4, 3), numpy.ones(4, dtype="int32")),
        "labels of dtype int64",
        "int32",
        'labels.astype("int64")',
    ),
    "a list": (([torch.ones(2, 3)], torch.ones(4).long()), "images as a tensor or a NumPy array", "a list", "torch.te"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_argument_that_does_not_fit_raises_with_the_fix(name: str):
    arguments, expected, found, fix = WRONG[name]
    with pytest.raises(DataError) as raised:
        make_whole_job(Mesh.solo())(*arguments)
    assert expected in str(raised.value.expected)
    assert found in str(raised.value.found)
    assert fix in raised.value.fix
    assert raised.value.where.startswith(display_name(__file__))


def test_a_per_device_placeholder_selects_the_mirrored_view():
    job = make_device_job(Mesh.solo())
    assert job.definition.view == "mirrored"
    results = job([torch.ones(2, 3), numpy.ones((1, 3), dtype="float32")])
    assert len(results) == 2
    assert len(job(LocalArgument(torch.ones(2, 3)))) == 1
    with pytest.raises(DataError, match=r"images\[1\] of shape \[any, 3\]"):
        job([torch.ones(2, 3), torch.ones(2, 4)])
    with pytest.raises(DataError, match="one element per device"):
        job(torch.ones(2, 3))


def test_invalid_placeholders_raise_at_decoration():
    with pytest.raises(ConfigError, match="PerDevice on images"):
        make_device_job(Mesh.solo(), "consistent")

    def bare(images: Annotated[Tensor, Whole]) -> Tensor:
        return images.sum()

    with pytest.raises(ConfigError, match="Whole with a shape and a dtype"):
        make_job(bare, model=nn.Linear(1, 1), optimizer=None, view=None, world=lambda: make_world(Mesh.solo()))


def make_job_with_default_dtype(mesh: Mesh, dtype: torch.dtype | None, view: str | None = None) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(3, 2, dtype=torch.float64)

    def score(images: Annotated[Tensor, Whole((4, 3))]) -> tuple[Tensor, Tensor]:
        made = torch.full((2,), 1 / 3)
        return (model(images) * made).sum(), made

    return make_job(score, model=model, optimizer=None, view=view, world=lambda: make_world(mesh)).configure({}, dtype)


def call_with_default_dtype(mesh: Mesh) -> tuple[float, str]:
    score, made = make_job_with_default_dtype(mesh, torch.float64)(torch.ones(4, 3, dtype=torch.float64))
    return float(score), str(made.dtype)


def test_a_default_dtype_applies_to_placeholders_and_new_tensors():
    wanted = call_with_default_dtype(Mesh.solo())
    assert wanted[1] == "torch.float64"
    found = on_mesh(2, call_with_default_dtype)
    assert [dtype for _, dtype in found] == ["torch.float64"] * 2
    assert [score for score, _ in found] == pytest.approx([wanted[0]] * 2, rel=1e-15)
    assert torch.get_default_dtype() == torch.float32
    _, made = make_job_with_default_dtype(Mesh.solo(), torch.float64, "mirrored")(
        torch.ones(4, 3, dtype=torch.float64)
    )[0]
    assert made.dtype == torch.float64


def test_without_a_default_dtype_torchs_applies_and_others_raise():
    with pytest.raises(DataError, match="float32"):
        make_job_with_default_dtype(Mesh.solo(), None)(torch.ones(4, 3, dtype=torch.float64))
    with pytest.raises(DataError, match="float64"):
        make_job_with_default_dtype(Mesh.solo(), torch.float64)(torch.ones(4, 3))
    with pytest.raises(ConfigError, match="floating-point"):
        make_job_with_default_dtype(Mesh.solo(), torch.int64)


def test_a_run_in_another_precision_accepts_the_scripts_dtypes():
    world = World(
        mesh=Mesh.solo(), notify=lambda _: None, send_record=lambda _: None, settings=RunSettings(dtype=torch.float64)
    )
    model = nn.Linear(3, 2)

    def score(images: Annotated[Tensor, Whole((4, 3), torch.float32)]) -> Tensor:
        return model(images).sum()

    job = make_job(score, model=model, optimizer=None, view=None, world=lambda: world)
    assert job(torch.ones(4, 3, dtype=torch.float64)).dtype == torch.float64
    with pytest.raises(DataError, match="float32"):
        job(torch.ones(4, 3, dtype=torch.int64))

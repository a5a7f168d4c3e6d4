"""Loaders and jobs divide batches along the axes of the mesh with the role `data`, by one rule."""

from typing import Any

import pytest
import torch
from support.processes import on_mesh
from support.two_axes import make_two_axes
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from rankless.context.world import World
from rankless.data.loader import Loader, LoaderOptions
from rankless.data.logical_tensor import LogicalTensor
from rankless.jobs.arguments import get_sharding
from rankless.jobs.job import make_job
from rankless.jobs.job_definition import StepOptions
from rankless.parallel.batch_division import BatchDivision
from rankless.parallel.mesh import AxisRole, Mesh, MeshAxis
from rankless.parallel.tensor_placement import Replicate, Shard

CPU = torch.device("cpu")


def make_mesh(rank: int, *axes: tuple[AxisRole, int]) -> Mesh:
    """Return the mesh of one worker, with axes of these roles and sizes from the outermost."""
    made, left = [], rank
    for role, size in reversed(axes):
        left, place = divmod(left, size)
        made.append(MeshAxis(name=f"{role} {len(made)}", role=role, rank=place, size=size))
    workers = torch.Size([size for _, size in axes]).numel()
    return Mesh(rank=rank, size=workers, device=CPU, axes=tuple(reversed(made)))


def find_rows(mesh: Mesh, rows: int) -> list[int]:
    """Return the numbers of this worker's rows, as a job takes them."""
    whole = torch.arange(rows)
    for axis, placement in zip(mesh.axes, get_sharding(whole, 0, mesh), strict=True):
        if isinstance(placement, Shard):
            whole = whole.narrow(0, placement.start(axis.rank), placement.lengths[axis.rank])
    return whole.tolist()


@pytest.mark.parametrize(
    ("axes", "rows", "lengths", "parts"),
    [
        ([("data", 4)], 10, (3, 3, 2, 2), (0, 1, 2, 3)),
        ([("data", 2), ("tensor", 2)], 5, (3, 2), (0, 0, 1, 1)),
        ([("tensor", 2), ("data", 2)], 5, (3, 2), (0, 1, 0, 1)),
        ([("data", 2), ("data", 2)], 6, (2, 1, 2, 1), (0, 1, 2, 3)),
        ([("data", 2), ("tensor", 2), ("data", 2)], 7, (2, 2, 2, 1), (0, 1, 0, 1, 2, 3, 2, 3)),
        ([("tensor", 3)], 5, (5,), (0, 0, 0)),
    ],
)
def test_only_the_axes_with_the_role_data_divide_a_batch(axes, rows, lengths, parts):
    workers = len(parts)
    for rank in range(workers):
        division = BatchDivision.of(make_mesh(rank, *axes))
        assert (division.split(rows), division.parts_of_workers, division.own_part) == (lengths, parts, parts[rank])
        start = sum(lengths[: parts[rank]])
        assert find_rows(make_mesh(rank, *axes), rows) == list(range(start, start + lengths[parts[rank]]))


def test_a_batch_with_fewer_rows_than_parts_is_not_divided():
    assert not BatchDivision.of(make_mesh(0, ("data", 4))).divides(3)
    assert BatchDivision.of(make_mesh(0, ("data", 2), ("tensor", 2))).divides(3)
    assert get_sharding(torch.zeros(3), 0, make_mesh(0, ("data", 4))) == (Replicate(),)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from torch.arange(14.0)


def read(mesh: Mesh, inner: AxisRole, how: str) -> list[tuple[list[float], list[float]]]:
    """Return this worker's rows, and the whole batch, of each batch of seven."""
    world = World(mesh=make_two_axes(mesh, inner), notify=print, send_record=print)
    dataset: Any = Stream() if how == "stream" else TensorDataset(torch.arange(14.0))
    options = LoaderOptions(batch_size=7, reading="split" if how == "stream" else how)  # type: ignore[arg-type]
    found = []
    for batch in Loader(dataset, options=options, world=lambda: world):
        tensor = batch if isinstance(batch, torch.Tensor) else batch[0]
        assert isinstance(tensor, LogicalTensor)
        local = tensor.local.tolist()
        found.append((local, tensor.whole().tolist()))
        assert tensor.local.tolist() == local
    return found


@pytest.mark.slow
@pytest.mark.parametrize("how", ["split", "replicated", "first", "stream"])
@pytest.mark.parametrize(("inner", "parts"), [("tensor", [(0, 4), (0, 4), (4, 7), (4, 7)])])
def test_workers_of_one_place_along_data_read_the_same_rows(inner: AxisRole, parts: list[tuple[int, int]], how: str):
    for (start, end), batches in zip(parts, on_mesh(4, read, inner, how), strict=True):
        assert [whole for _, whole in batches] == [[float(row + first) for row in range(7)] for first in (0, 7)]
        assert [local for local, _ in batches] == [whole[start:end] for _, whole in batches]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["split", "first"])
def test_two_axes_with_the_role_data_divide_what_is_left(how: str):
    parts = [(0, 2), (2, 4), (4, 6), (6, 7)]
    for (start, end), batches in zip(parts, on_mesh(4, read, "data", how), strict=True):
        assert [local for local, _ in batches] == [whole[start:end] for _, whole in batches]


def train(mesh: Mesh) -> list[list[float]]:
    """Return the losses and parameters of a job whose batches come from a loader, on data=2, tensor=2."""
    mesh = make_two_axes(mesh) if mesh.size > 1 else mesh
    world = World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None)
    torch.manual_seed(0)
    model = nn.Linear(1, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

    def function(x: torch.Tensor) -> torch.Tensor:
        return (model(x) - x).square().mean()

    job = make_job(
        function, model=model, optimizer=optimizer, view=None, world=lambda: world, step_options=StepOptions()
    )
    dataset = TensorDataset(torch.arange(14.0, dtype=torch.float64)[:, None])
    loader = Loader(dataset, options=LoaderOptions(batch_size=7), world=lambda: world)
    losses = [float(job(x)) for (x,) in loader]
    return [losses, [value for item in model.parameters() for value in item.flatten().tolist()]]


@pytest.mark.slow
def test_a_job_on_two_axes_trains_as_on_one_device():
    wanted = train(Mesh.solo())
    for found in on_mesh(4, train):
        assert torch.allclose(torch.tensor(found[0]), torch.tensor(wanted[0]), rtol=1e-12, atol=0)
        assert torch.allclose(torch.tensor(found[1]), torch.tensor(wanted[1]), rtol=1e-12, atol=0)

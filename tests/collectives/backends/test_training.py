"""Training on a shared memory group ends with the parameters that training on Gloo gives."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives.backends.shared_groups import shared_group
from support.processes import on_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import rankless.collectives as collectives
from rankless.parallel.mesh import Mesh


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(20, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 8)
    ).double()


def train(model: torch.nn.Module, rank: int, steps: int = 5) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(steps):
        inputs = torch.randn(16, 20, generator=generator, dtype=torch.float64)
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def train_with_ddp(mesh: Mesh, options: dict[str, Any]) -> None:
    plain = make_model()
    on_gloo = DistributedDataParallel(copy.deepcopy(plain), process_group=mesh.group, **options)
    train(on_gloo, mesh.rank)
    with shared_group(mesh) as group:
        shared = DistributedDataParallel(copy.deepcopy(plain), process_group=group, **options)
        train(shared, mesh.rank)
        for found, expected in zip(shared.parameters(), on_gloo.parameters(), strict=True):
            assert (
                torch.equal(found, expected)
                if mesh.size == 2
                else torch.allclose(found, expected, rtol=1e-12, atol=1e-14)
            )
        del shared


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ],
    ids=["plain", "small buckets", "static graph", "unused parameters"],
)
def test_ddp_trains_as_on_gloo(size: int, options: dict[str, Any]):
    on_mesh(size, train_with_ddp, options)


def train_with_fsdp(mesh: Mesh) -> None:
    plain = make_model()
    found = []
    with shared_group(mesh) as group:
        for each in (mesh.group, group):
            model = copy.deepcopy(plain)
            fully_shard(model, mesh=DeviceMesh.from_group(each, "cpu"))
            train(model, mesh.rank)
            parameters = list(model.parameters())
            assert all(isinstance(parameter, DTensor) for parameter in parameters)
            found.append([parameter.to_local().clone() for parameter in parameters])
            del model, parameters
        for on_gloo, shared in zip(*found, strict=True):
            assert torch.allclose(on_gloo, shared, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_fsdp_trains_as_on_gloo():
    on_mesh(2, train_with_fsdp)


def call_objects_and_ours(mesh: Mesh) -> list[Any]:
    with shared_group(mesh) as group:
        objects: list[Any] = [None] * mesh.size
        dist.all_gather_object(objects, {"rank": mesh.rank}, group=group)
        values = torch.full((3,), float(mesh.rank))
        collectives.all_reduce(values, group=group)
        rows = collectives.all_gather
        into = [torch.zeros(1 + rank) for rank in range(mesh.size)]
        rows(into, torch.full((1 + mesh.rank,), float(mesh.rank)), group=group)
        return [objects, values.tolist(), [tensor.tolist() for tensor in into]]


def test_objects_and_the_checked_collectives_use_the_group():
    expected = [[{"rank": 0}, {"rank": 1}], [1.0, 1.0, 1.0], [[0.0], [1.0, 1.0]]]
    assert on_mesh(2, call_objects_and_ours) == [expected, expected]

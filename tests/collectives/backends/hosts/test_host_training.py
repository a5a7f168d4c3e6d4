"""Training on a hierarchical group ends with the parameters of training on Gloo; asynchronous operations keep order."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives.backends.hosts.host_groups import hosts_group
from collectives.backends.test_training import make_model, train
from support.processes import on_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from rankless import collectives
from rankless.parallel.mesh import Mesh

pytestmark = pytest.mark.slow


def train_with_ddp(mesh: Mesh, hosts: str, options: dict[str, Any]) -> None:
    plain = make_model()
    on_gloo = DistributedDataParallel(copy.deepcopy(plain), process_group=mesh.group, **options)
    train(on_gloo, mesh.rank)
    with hosts_group(mesh, hosts) as group:
        trained = DistributedDataParallel(copy.deepcopy(plain), process_group=group, **options)
        train(trained, mesh.rank)
        for found, expected in zip(trained.parameters(), on_gloo.parameters(), strict=True):
            assert torch.allclose(found, expected, rtol=1e-12, atol=1e-14)
        del trained


@pytest.mark.parametrize("hosts", ["aab", "abab"])
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.001}], ids=["plain", "small buckets"])
def test_ddp_across_hosts_trains_as_on_gloo(hosts: str, options: dict[str, Any]):
    on_mesh(len(hosts), train_with_ddp, hosts, options)


def train_with_fsdp(mesh: Mesh, hosts: str) -> None:
    plain, found = make_model(), []
    with hosts_group(mesh, hosts) as group:
        for each in (mesh.group, group):
            model = copy.deepcopy(plain)
            fully_shard(model, mesh=DeviceMesh.from_group(each, "cpu"))
            train(model, mesh.rank)
            found.append([parameter.to_local().clone() for parameter in model.parameters()])
            del model
        for on_gloo, ours in zip(*found, strict=True):
            assert torch.allclose(on_gloo, ours, rtol=1e-12, atol=1e-14)


def test_fsdp_across_hosts_trains_as_on_gloo():
    on_mesh(3, train_with_fsdp, "aab")


def call_in_flight(mesh: Mesh, hosts: str) -> list[float]:
    """Start many operations on one tensor and others, and wait for the last first."""
    with hosts_group(mesh, hosts) as group:
        values, works = torch.ones(50_000, dtype=torch.float64), []
        for number in range(6):
            works.append(dist.all_reduce(values, group=group, async_op=True))
            works.append(dist.broadcast(values, group_src=number % mesh.size, group=group, async_op=True))
        dist.all_reduce(torch.ones(3), group=group)
        futures = [work.get_future() for work in works if work is not None]
        for work in reversed(works):
            assert work is not None
            work.wait()
        assert all(future.done() for future in futures)
        return [float(values[0]), float(values[-1])]


@pytest.mark.parametrize("hosts", ["aab", "abab", "abca"])
def test_operations_in_flight_run_in_order(hosts: str):
    expected = float(len(hosts) ** 6)
    assert on_mesh(len(hosts), call_in_flight, hosts) == [[expected, expected]] * len(hosts)


def call_objects_and_ours(mesh: Mesh, hosts: str) -> list[Any]:
    with hosts_group(mesh, hosts) as group:
        objects: list[Any] = [None] * mesh.size
        dist.all_gather_object(objects, {"rank": mesh.rank}, group=group)
        values = torch.full((3,), float(mesh.rank))
        collectives.all_reduce(values, group=group)
        group.monitored_barrier()
        return [[each["rank"] for each in objects], values.tolist(), group.allocate(3, torch.float32)]


def test_objects_and_the_checked_collectives_use_the_hierarchical_group():
    assert on_mesh(3, call_objects_and_ours, "aba") == [[[0, 1, 2], [3.0] * 3, None]] * 3

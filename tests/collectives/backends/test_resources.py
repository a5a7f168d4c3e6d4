"""Closing a group releases its descriptors, mappings, threads and files, whatever has happened to the group."""

import gc

import pytest
import torch
import torch.distributed as dist
from collectives.backends.shared_groups import list_open, make_group
from support.processes import on_mesh
from torch.distributed import distributed_c10d

from rankless.collectives.backends import close_shared_memory_group
from rankless.errors import CollectiveError
from rankless.parallel.mesh import Mesh


def use_and_close(mesh: Mesh, how: str) -> tuple[list[str], list[str], list[str]]:
    """Return what was open before the group, while it was there, and after it was closed."""
    dist.barrier(group=mesh.group)
    before = list_open()
    group = make_group(mesh, list(range(mesh.size)))
    tensor = group.allocate(100_000, torch.float32)
    dist.all_reduce(tensor, group=group)
    works = [dist.all_reduce(torch.ones(1_000_000), group=group, async_op=True)]
    received = torch.zeros(100_000)
    works.append(dist.isend(torch.ones(100_000), group=group, group_dst=(mesh.rank + 1) % mesh.size))
    works.append(dist.irecv(received, group=group, group_src=(mesh.rank - 1) % mesh.size))
    for work in works:
        assert work is not None
        work.wait()
    during = list_open()
    dist.barrier(group=mesh.group)
    if how == "aborted":
        pending = dist.irecv(received, group=group, group_src=(mesh.rank - 1) % mesh.size)
        assert pending is not None
        dist.barrier(group=mesh.group)
        group.abort()
        with pytest.raises(CollectiveError):
            pending.wait()
        with pytest.raises(CollectiveError):
            dist.barrier(group=group)
    if how == "destroyed":
        dist.destroy_process_group(group)
    else:
        close_shared_memory_group(group)
        close_shared_memory_group(group)
    del tensor
    assert group not in distributed_c10d._world.pg_map
    return before, during, list_open()


@pytest.mark.parametrize("how", ["closed", "destroyed", "aborted"])
@pytest.mark.ci_sample(1)
def test_a_closed_group_leaves_nothing_open(how: str):
    for before, during, after in on_mesh(3, use_and_close, how):
        assert during != before
        assert after == before


def keep_a_tensor(mesh: Mesh) -> float:
    group = make_group(mesh, list(range(mesh.size)))
    tensor = group.allocate(1000, torch.float32)
    tensor.fill_(2.0)
    dist.all_reduce(tensor, group=group)
    close_shared_memory_group(group)
    gc.collect()
    total = float(tensor.sum())
    before = list_open()
    del tensor
    assert len(list_open()) < len(before)
    return total


def test_a_shared_tensor_outlives_its_group():
    assert on_mesh(2, keep_a_tensor) == [4000.0, 4000.0]


def call_closed(mesh: Mesh) -> str:
    group = make_group(mesh, list(range(mesh.size)))
    close_shared_memory_group(group)
    with pytest.raises(CollectiveError) as caught:
        group.barrier()
    return str(caught.value)


def test_a_closed_group_refuses_calls():
    assert "has closed the group" in on_mesh(2, call_closed)[0]

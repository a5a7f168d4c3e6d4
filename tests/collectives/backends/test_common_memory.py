"""Memory that is the same on all workers."""

import pytest
import torch
import torch.distributed as dist
from collectives.backends.shared_groups import in_shared_memory, list_open, shared_group
from support.processes import on_mesh

from rankless.collectives.backends.shared_tensor_memory import can_have_common_memory, map_common


def write_and_read(mesh):
    """Let each worker write its own part. Return what it then reads."""
    memory = map_common(mesh.size * 8, "test", among=mesh)
    assert memory is not None
    values = memory.view(torch.int64)
    assert values.tolist() == [0] * mesh.size
    dist.barrier(group=mesh.group)
    values[mesh.rank] = mesh.rank + 5
    dist.barrier(group=mesh.group)
    return values.tolist()


@pytest.mark.parametrize("size", [2, 3])
def test_what_one_worker_writes_the_others_read(size):
    assert on_mesh(size, in_shared_memory, write_and_read) == [[rank + 5 for rank in range(size)]] * size


def map_different_memories(mesh):
    """Return whether there is memory if workers want other sizes, other things, none, and the same."""
    wanted = [(64 + mesh.rank, "a"), (64, f"a{mesh.rank}"), (0, "a"), (64, "a")]
    return [map_common(*each, among=mesh) is not None for each in wanted]


def test_all_workers_or_none_get_memory():
    assert on_mesh(2, in_shared_memory, map_different_memories) == [[False, False, False, True]] * 2


def release(mesh):
    """Return what is open before the memory, while a view of it lives, and after it."""
    with shared_group(mesh) as group:
        before = list_open()
        memory = group.map_common(100_000, "test")
        part = memory[10:20].view(torch.int16)
        del memory
        during = list_open()
        del part
        return before, during, list_open()


def test_the_memory_is_released_with_the_last_tensor_over_it():
    for before, during, after in on_mesh(2, release):
        assert len(during) > len(before)
        assert after == before


def ask_without_shared_memory(mesh):
    return can_have_common_memory(mesh.device, among=mesh), map_common(64, "test", among=mesh)


def test_a_gloo_group_has_none():
    assert on_mesh(2, ask_without_shared_memory) == [(False, None)] * 2

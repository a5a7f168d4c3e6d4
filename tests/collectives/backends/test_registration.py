"""The backend "shared_memory" of torch.distributed: default and new groups, meshes, calls' timeouts, and forks."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives.backends.shared_groups import list_open, make_group, new_store, shared_group
from support.forked_calls import use_in_a_fork
from support.processes import on_mesh

from rankless import collectives
from rankless.collectives.backends import SharedMemoryProcessGroup, register_backend, shared_memory_mapping
from rankless.collectives.backends.double_buffered_slots import count_slot_bytes
from rankless.collectives.backends.futex_signals import ControlLayout
from rankless.collectives.backends.message_transfers import RingLayout
from rankless.collectives.checked_process_group import resolve_group
from rankless.config.shared_memory_support import GROUP_BYTES_PER_RANK
from rankless.errors import CollectiveError
from rankless.parallel.mesh import Mesh


def make_new_groups(mesh: Mesh) -> list[Any]:
    register_backend()
    register_backend()
    ranks = [rank for rank in (0, 2) if rank < mesh.size]
    group = dist.new_group(ranks, backend="shared_memory", timeout=timedelta(seconds=20))
    found: list[Any] = []
    if mesh.rank in ranks:
        assert isinstance(group, SharedMemoryProcessGroup)
        values = torch.full((5,), float(mesh.rank + 1))
        dist.all_reduce(values, group=group)
        checked = resolve_group(group)
        assert checked is not None
        found = [dist.get_backend(group), values.tolist(), checked.queues.timeout.total_seconds()]
        dist.broadcast(values, src=ranks[-1], group=group)
    dist.barrier(group=mesh.group)
    dist.destroy_process_group(group)
    return found


def test_a_new_group_of_the_backend_is_in_shared_memory():
    expected = ["shared_memory", [4.0] * 5, 20.0]
    assert on_mesh(3, make_new_groups) == [expected, [], expected]


def list_devices(mesh: Mesh) -> tuple[list[Any], list[str]]:
    register_backend()
    found: list[Any] = []
    original = SharedMemoryProcessGroup._set_group_desc

    def describe(group: SharedMemoryProcessGroup, text: str) -> None:
        found.extend(group._device_types)
        original(group, text)

    SharedMemoryProcessGroup._set_group_desc = describe  # type: ignore[method-assign]
    try:
        group = dist.new_group(list(range(mesh.size)), backend="shared_memory")
    finally:
        SharedMemoryProcessGroup._set_group_desc = original  # type: ignore[method-assign]
    devices = list(map(str, group._device_types))
    dist.destroy_process_group(group)
    return found, devices


def test_a_group_has_devices_once_torch_has_made_it():
    """To a group that has some earlier PyTorch 2.15 attaches a recorder for groups in C++, which raises."""
    assert on_mesh(2, list_devices) == [([], ["cpu"])] * 2


def make_group_without_memory(mesh: Mesh) -> str:
    register_backend()
    original = shared_memory_mapping._create
    if mesh.rank == 0:
        shared_memory_mapping._create = lambda *_: (None, "")
    try:
        group = dist.new_group(list(range(mesh.size)), backend="shared_memory")
    finally:
        shared_memory_mapping._create = original
    values = torch.ones(3)
    dist.all_reduce(values, group=group)
    assert values.tolist() == [2.0] * 3
    dist.destroy_process_group(group)
    return type(group).__name__


def test_a_new_group_without_memory_is_one_of_gloo():
    assert on_mesh(2, make_group_without_memory) == ["ProcessGroup"] * 2


def reduce_along_axes(mesh: Mesh) -> list[float]:
    register_backend()
    names = ("rows", "columns")
    override: Any = dict.fromkeys(names, "shared_memory")
    grid = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=names, backend_override=override)
    found = []
    for axis in ("rows", "columns"):
        group = grid.get_group(axis)
        assert isinstance(group, SharedMemoryProcessGroup)
        values = torch.tensor([10.0**mesh.rank])
        collectives.all_reduce(values, group=group)
        found.append(float(values))
    dist.barrier(group=mesh.group)
    for axis in ("rows", "columns"):
        dist.destroy_process_group(grid.get_group(axis))
    return found


def test_the_axes_of_a_device_mesh_are_groups_in_shared_memory():
    assert on_mesh(4, reduce_along_axes) == [[101, 11], [1010, 11], [101, 1100], [1010, 1100]]


def limit_a_call(mesh: Mesh, how: str) -> str:
    group = make_group(mesh, list(range(mesh.size)), 300.0)
    error = ""
    if mesh.rank == 0:
        limit = timedelta(seconds=0.3)
        options: Any = dist.BarrierOptions() if how == "barrier" else dist.AllreduceOptions()
        options.timeout = limit
        options.asyncOp = how == "asynchronous"
        calls: dict[str, Callable[[], Any]] = {
            "barrier": lambda: group.barrier(options),
            "monitored barrier": lambda: group.monitored_barrier(limit),
        }
        call = calls.get(how, lambda: group.allreduce([torch.ones(3)], options).wait())
        with pytest.raises(CollectiveError) as caught:
            call()
        error = str(caught.value)
    dist.barrier(group=mesh.group)
    group.shutdown()
    return error


@pytest.mark.parametrize("how", ["barrier", "all_reduce", "asynchronous", "monitored barrier"])
def test_a_call_may_have_a_timeout_of_its_own(how: str):
    assert "rank 1 did not take part within 0.3 s" in on_mesh(2, limit_a_call, how)[0]


def fork_and_call(mesh: Mesh) -> tuple[int, float]:
    with shared_group(mesh) as group:
        return use_in_a_fork(group, mesh)


def test_a_forked_process_cannot_use_or_damage_the_group_of_its_parent():
    assert on_mesh(2, fork_and_call) == [(0, 2.0)] * 2


def rebuild(mesh: Mesh) -> list[bool]:
    """Destroy and make a group ten times, as elastic jobs do."""
    register_backend()
    before = list_open()
    found = []
    for _ in range(10):
        group = dist.new_group(list(range(mesh.size)), backend="shared_memory")
        values = torch.ones(100_000)
        dist.all_reduce(values, group=group)
        dist.barrier(group=mesh.group)
        dist.destroy_process_group(group)
        del group
        found.append(bool((values == mesh.size).all()))
    assert list_open() == before
    return found


def test_a_group_can_be_made_again_and_again():
    assert on_mesh(3, rebuild) == [[True] * 10] * 3


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 16, 64])
def test_a_group_takes_no_more_memory_than_the_doctor_tries_to_reserve(size: int):
    needed = ControlLayout(size).byte_count + count_slot_bytes(size) + RingLayout(size).byte_count + 8192
    assert needed <= size * GROUP_BYTES_PER_RANK


def test_a_store_with_other_keys_makes_another_group():
    assert on_mesh(2, make_two_groups) == [[2.0, 4.0]] * 2


def make_two_groups(mesh: Mesh) -> list[float]:
    assert new_store(mesh) is not None
    values = torch.ones(1)
    found = []
    with shared_group(mesh) as one, shared_group(mesh) as other:
        for group in (one, other):
            dist.all_reduce(values, group=group)
            found.append(float(values))
    return found

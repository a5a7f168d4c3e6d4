"""Which group ranks of several hosts get: hierarchical, in shared memory or of Gloo; all ranks decide alike."""

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives.backends.hosts.host_groups import acting_hosts, hosts_group, make_group
from collectives.backends.shared_groups import new_store
from support.processes import on_mesh

from rankless import collectives
from rankless.collectives.backends import shared_memory_mapping
from rankless.collectives.backends.group_failure_errors import Membership
from rankless.collectives.backends.hosts.hosts_group import HostsGroup, find_host_name, open_hosts_group
from rankless.collectives.backends.hosts.process_group import register_hierarchical_backend
from rankless.collectives.backends.hosts.ranks_of_hosts import RanksOfHosts
from rankless.collectives.backends.shared_group import SharedGroup
from rankless.config.shared_memory_support import Support
from rankless.errors import CollectiveError
from rankless.parallel.mesh import Mesh


def test_a_layout_names_the_hosts_in_the_order_of_their_first_ranks():
    layout = RanksOfHosts.from_identities(3, ["b", "a", "b", "a", "c"])
    assert layout.hosts == ((0, 2), (1, 3), (4,))
    assert (layout.host, layout.members, layout.is_leader, layout.size) == (1, (1, 3), False, 5)
    assert layout.leaders == (0, 1, 4)
    assert [layout.find_host(rank) for rank in range(5)] == [0, 1, 0, 1, 2]


def test_processes_in_another_network_are_on_another_host(monkeypatch: pytest.MonkeyPatch):
    own = find_host_name()
    assert os.readlink("/proc/self/ns/net") in own
    monkeypatch.setattr("os.readlink", lambda _: "net:[1]")
    assert find_host_name() != own


def open_group(mesh: Mesh, hosts: str, objecting_rank: int) -> str:
    objection = "RANKLESS_BACKEND=gloo" if mesh.rank == objecting_rank else ""
    member = Membership(rank=mesh.rank, global_ranks=tuple(range(mesh.size)), timeout_seconds=20.0)
    store, timeout = new_store(mesh), timedelta(seconds=20)
    opened = open_hosts_group(store, member, timeout, objection=objection, host=hosts[mesh.rank])
    if isinstance(opened, Support):
        return opened.reason
    dist.barrier(group=mesh.group)
    opened.close()
    assert isinstance(opened, SharedGroup | HostsGroup)
    return type(opened).__name__


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "objecting_rank", "expected"),
    [
        ("aab", -1, "HostsGroup"),
        ("aba", -1, "HostsGroup"),
        ("aaa", -1, "SharedGroup"),
        ("abc", -1, "every host has one rank of the group"),
        ("aab", 2, "rank 2: RANKLESS_BACKEND=gloo"),
        ("aab", 1, "rank 1: RANKLESS_BACKEND=gloo"),
    ],
)
def test_all_ranks_agree_on_the_group(hosts: str, objecting_rank: int, expected: str):
    assert on_mesh(3, open_group, hosts, objecting_rank) == [expected] * 3


def make_group_without_memory(mesh: Mesh, hosts: str) -> list[Any]:
    original = shared_memory_mapping._create
    if mesh.rank == mesh.size - 1 or hosts[mesh.rank] == hosts[-1]:
        shared_memory_mapping._create = lambda *_: (None, "")
    try:
        group = make_group(mesh, hosts)
    finally:
        shared_memory_mapping._create = original
    values = torch.ones(3)
    dist.all_reduce(values, group=group)
    dist.destroy_process_group(group)
    return [type(group).__name__, values.tolist()]


@pytest.mark.slow
def test_a_host_without_memory_makes_all_ranks_use_gloo():
    assert on_mesh(4, make_group_without_memory, "aabb") == [["ProcessGroup", [4.0] * 3]] * 4


def open_with_a_late_rank(mesh: Mesh, hosts: str) -> str:
    store = new_store(mesh)
    if mesh.rank == 2:
        dist.barrier(group=mesh.group)
        return ""
    member = Membership(rank=mesh.rank, global_ranks=(0, 1, 2), timeout_seconds=0.3)
    start = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        open_hosts_group(store, member, timedelta(seconds=0.3), host=hosts[mesh.rank])
    assert time.monotonic() - start < 5
    dist.barrier(group=mesh.group)
    return str(caught.value)


@pytest.mark.slow
def test_a_rank_that_does_not_open_the_group_is_named():
    for error in on_mesh(3, open_with_a_late_rank, "aab")[:2]:
        assert "rank 2 of the group did not within 0.3 s" in error


def make_subgroups(mesh: Mesh, hosts: str, all_ranks: list[list[int]]) -> list[list[Any]]:
    found = []
    register_hierarchical_backend()
    with hosts_group(mesh, hosts), acting_hosts(mesh, hosts):
        for ranks in all_ranks:
            group = dist.new_group(ranks, backend="hierarchical", timeout=timedelta(seconds=20))
            if mesh.rank in ranks:
                values = torch.tensor([10.0**mesh.rank])
                collectives.all_reduce(values, group=group)
                work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
                dist.broadcast(values, src=ranks[0], group=group)
                assert work is not None
                work.wait()
                found.append([type(group).__name__, float(values)])
            dist.barrier(group=mesh.group)
            dist.destroy_process_group(group)
    return found


@pytest.mark.slow
def test_subgroups_are_hierarchical_or_in_shared_memory_or_of_gloo():
    found = on_mesh(4, make_subgroups, "abab", [[0, 1, 2], [0, 2], [2, 3], [1, 3]])
    hierarchical, gloo = ["HierarchicalProcessGroup", 111.0], ["ProcessGroup", 1100.0]
    pair, other = ["SharedMemoryProcessGroup", 101.0], ["SharedMemoryProcessGroup", 1010.0]
    assert found == [[hierarchical, pair], [hierarchical, other], [hierarchical, pair, gloo], [gloo, other]]


def reduce_along_axes(mesh: Mesh, hosts: str) -> list[Any]:
    register_hierarchical_backend()
    names = ("rows", "columns")
    override: Any = dict.fromkeys(names, "hierarchical")
    with acting_hosts(mesh, hosts):
        grid = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=names, backend_override=override)
    found: list[Any] = []
    for axis in names:
        values = torch.tensor([10.0**mesh.rank])
        dist.all_reduce(values, group=grid.get_group(axis))
        found += [type(grid.get_group(axis)).__name__, float(values)]
    dist.barrier(group=mesh.group)
    for axis in names:
        dist.destroy_process_group(grid.get_group(axis))
    return found


@pytest.mark.slow
def test_an_axis_of_a_device_mesh_within_hosts_is_in_shared_memory():
    sums = [(101, 11), (1010, 11), (101, 1100), (1010, 1100)]
    expected = [["ProcessGroup", rows, "SharedMemoryProcessGroup", columns] for rows, columns in sums]
    assert on_mesh(4, reduce_along_axes, "aabb") == expected

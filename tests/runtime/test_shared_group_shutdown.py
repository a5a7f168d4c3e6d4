"""`end_shared_groups` ends the groups in shared memory of other processes, and touches no other shared memory."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives.backends.shared_groups import make_group
from support.processes import on_mesh

from rankless.errors import CollectiveError
from rankless.parallel.mesh import Mesh
from rankless.runtime.release_waiting_ranks import end_shared_groups


def wait_for_a_silent_rank(mesh: Mesh) -> tuple[str, bool]:
    """Rank 0 waits for rank 1, which ends the groups of rank 0's process instead."""
    group = make_group(mesh, list(range(mesh.size)), 300.0)
    tensor = group.allocate(1000, torch.float32)
    processes: list[Any] = [None] * mesh.size
    dist.all_gather_object(processes, os.getpid(), group=mesh.group)
    if mesh.rank == 1:
        end_shared_groups([processes[0]])
        end_shared_groups([processes[0]])
    with pytest.raises(CollectiveError) as caught:
        dist.all_reduce(torch.ones(10), group=group)
    dist.barrier(group=mesh.group)
    group.shutdown()
    return str(caught.value), bool((tensor == 0).all())


def test_a_rank_that_waits_raises_when_its_groups_are_ended_from_outside():
    for error, is_untouched in on_mesh(2, wait_for_a_silent_rank):
        assert "the launcher ends the run, and has ended the group" in error
        assert is_untouched


def test_processes_that_have_ended_are_ignored():
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    end_shared_groups([child])

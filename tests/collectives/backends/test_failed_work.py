"""A collective that fails raises a `RuntimeError` with its cause in every caller of `Work` that torch has."""

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives.backends.hosts import host_groups
from collectives.backends.shared_groups import make_group
from collectives.backends.work_callers import CALLERS
from support.processes import on_mesh

from rankless.collectives.backends import close_shared_memory_group
from rankless.errors import CollectiveError
from rankless.parallel.mesh import Mesh

FAULTS = {
    "leaves": ("rank 1 has closed the group", "the connection to rank 1 is lost"),
    "aborts": ("rank 1 aborted the group",),
    "is absent": ("did not take part within",),
    "makes another call": ("to match the call of", "the calls of the ranks do not match", "did not take part within"),
}
"""What rank 1 does instead of its call, and what the other ranks' error then says."""
MESSAGES = ("recv", "batch_isend_irecv", "recv_object_list")
"""Calls between two ranks. Across hosts Gloo carries them, and the error may be Gloo's."""
OF_GLOO = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting 1000ms")


def fail(group: Any, fault: str) -> None:
    if fault == "leaves":
        group.shutdown()
    elif fault == "aborts":
        group.abort()
    elif fault == "makes another call":
        with pytest.raises(CollectiveError):
            dist.reduce(torch.ones(777), group=group, group_dst=1)


def call_beside_a_fault(mesh: Mesh, caller: str, fault: str, hosts: str | None) -> str:
    """Return the error of this rank's call, while rank 1 does not make it."""
    timeout_seconds = 30.0 if fault in ("leaves", "aborts") else 1.0
    if hosts is None:
        group = make_group(mesh, range(mesh.size), timeout_seconds)
    else:
        group = host_groups.make_group(mesh, hosts, timeout_seconds=timeout_seconds)
    call = CALLERS[caller](group)
    dist.barrier(group=mesh.group)
    found = ""
    if mesh.rank == 1:
        fail(group, fault)
    else:
        try:
            call()
        except RuntimeError as error:
            found = str(error)
        with pytest.raises(CollectiveError):
            dist.barrier(group=group)
    dist.barrier(group=mesh.group)
    del call
    gc.collect()
    if hosts is None:
        close_shared_memory_group(group)
    else:
        dist.destroy_process_group(group)
    return found


def check(size: int, caller: str, fault: str, hosts: str | None = None) -> None:
    answers = on_mesh(size, call_beside_a_fault, caller, fault, hosts)
    expected = FAULTS[fault] if hosts is None or caller not in MESSAGES else (*FAULTS[fault], *OF_GLOO)
    for rank in {*range(size)} - {1}:
        assert any(text in answers[rank] for text in expected), answers


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("caller", CALLERS)
def test_every_caller_of_work_learns_why_a_collective_failed(caller: str, fault: str):
    check(2, caller, fault)


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("caller", CALLERS)
def test_every_caller_across_hosts_learns_why_a_collective_failed(caller: str, fault: str):
    check(3, caller, fault, "aab")


@pytest.mark.parametrize(
    ("caller", "fault", "hosts"),
    [
        ("DDP", "leaves", None),
        ("DDP powerSGD_hook", "is absent", None),
        ("functional wait_tensor", "aborts", None),
        ("future.then", "makes another call", None),
        ("DDP", "aborts", "aab"),
    ],
)
@pytest.mark.ci_sample(2)
def test_callers_in_python_and_in_cpp_learn_why_a_collective_failed(caller: str, fault: str, hosts: str | None):
    check(2 if hosts is None else 3, caller, fault, hosts)

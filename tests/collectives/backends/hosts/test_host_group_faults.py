"""A rank that ends, stops, aborts, closes or raises ends the waits of the ranks of all hosts, by its name."""

import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives.backends.hosts.host_groups import hosts_group, make_group
from collectives.backends.shared_groups import list_open
from collectives.backends.test_group_faults import make_calls, own_workers
from support.forked_calls import use_in_a_fork
from support.processes import on_mesh

from rankless.errors import CollectiveError
from rankless.parallel.mesh import Mesh

pytestmark = pytest.mark.slow
MOST_SECONDS = 15.0


def call_until_failure(mesh: Mesh, hosts: str, ending_rank: int, how: str) -> tuple[str, float]:
    """Make calls until one rank ends; return the error, and how long the failing call took."""
    timeout_seconds = 3.0 if how == "stopping" else 30.0
    group = make_group(mesh, hosts, timeout_seconds=timeout_seconds)
    processes: list[Any] = [None] * mesh.size
    dist.all_gather_object(processes, os.getpid(), group=mesh.group)
    for number in range(1000):
        if number == 8 and mesh.rank == ending_rank:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif how == "stopping":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif how == "aborting":
                group.abort()
            else:
                group.shutdown()
        start = time.monotonic()
        try:
            make_calls(group, mesh.rank, [0, 1, 3][number % 3])
        except CollectiveError as error:
            seconds = time.monotonic() - start
            with pytest.raises(CollectiveError):
                dist.barrier(group=group)
            if how == "stopping" and mesh.rank != ending_rank:
                os.kill(processes[ending_rank], signal.SIGCONT)
            dist.destroy_process_group(group)
            return str(error), seconds
    return "", 0.0


CASES = [("aabb", 0), ("aabb", 3), ("aab", 1), ("aab", 2)]


@pytest.mark.ci_sample(2)
@pytest.mark.parametrize(("hosts", "rank"), CASES)
def test_a_killed_rank_ends_the_calls_of_all_hosts(hosts: str, rank: int):
    with own_workers(len(hosts)) as pool:
        answers = pool.call(call_until_failure, (hosts, rank, "killed"))
    assert isinstance(answers.pop(rank), RuntimeError)
    for error, seconds in answers:
        assert f"the process of rank {rank} has ended" in error or f"the connection to rank {rank} is lost" in error
        assert seconds < MOST_SECONDS


@pytest.mark.parametrize(("hosts", "rank"), CASES)
def test_an_aborting_rank_ends_the_calls_of_all_hosts_by_name(hosts: str, rank: int):
    for error, seconds in on_mesh(len(hosts), call_until_failure, hosts, rank, "aborting"):
        assert f"rank {rank} aborted the group" in error
        assert seconds < MOST_SECONDS


@pytest.mark.parametrize(("hosts", "rank"), CASES)
def test_a_rank_that_closes_its_group_ends_the_calls_of_all_hosts(hosts: str, rank: int):
    for error, seconds in on_mesh(len(hosts), call_until_failure, hosts, rank, "closing"):
        assert f"rank {rank} has closed the group" in error or f"the connection to rank {rank} is lost" in error
        assert seconds < MOST_SECONDS


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize(("hosts", "rank"), CASES)
def test_a_stopped_rank_ends_the_calls_of_all_hosts_after_the_timeout(hosts: str, rank: int):
    with own_workers(len(hosts)) as pool:
        answers = pool.call(call_until_failure, (hosts, rank, "stopping"))
    answers.pop(rank)
    for error, seconds in answers:
        assert f"rank {rank} did not take part within 3 s" in error, error
        assert seconds < MOST_SECONDS


def raise_in_the_middle(mesh: Mesh, hosts: str) -> str:
    """Rank 0 is interrupted while it waits in a collective; return each rank's error."""
    with hosts_group(mesh, hosts) as group:
        dist.all_reduce(torch.ones(3), group=group)
        if mesh.rank == 0:
            threading.Timer(0.3, signal.raise_signal, (signal.SIGUSR2,)).start()
            signal.signal(signal.SIGUSR2, _interrupt)
        if mesh.rank == mesh.size - 1:
            # It comes late, so the others wait.
            error = _catch(lambda: (dist.barrier(group=mesh.group), dist.all_reduce(torch.ones(3), group=group)))
        else:
            error = _catch(lambda: dist.all_reduce(torch.ones(3), group=group))
            dist.barrier(group=mesh.group)
        return error


def _interrupt(*_: Any) -> None:
    raise ValueError("from a signal handler")


def _catch(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("hosts", ["aabb", "abb"])
def test_a_rank_that_raises_in_a_collective_ends_those_of_all_hosts(hosts: str):
    first, *others = on_mesh(len(hosts), raise_in_the_middle, hosts)
    assert first.startswith("ValueError"), first
    for error in others:
        assert "rank 0 left a collective because of an exception" in error


def limit_a_call(mesh: Mesh, hosts: str) -> str:
    group = make_group(mesh, hosts, timeout_seconds=300.0)
    error = ""
    if mesh.rank == 0:
        options: Any = dist.AllreduceOptions()
        options.timeout, options.asyncOp = timedelta(seconds=0.4), False
        with pytest.raises(CollectiveError) as caught:
            group.allreduce([torch.ones(3)], options)
        error = str(caught.value)
    dist.barrier(group=mesh.group)
    dist.destroy_process_group(group)
    return error


@pytest.mark.parametrize("hosts", ["aab", "abb"])
def test_a_call_across_hosts_may_have_a_timeout_of_its_own(hosts: str):
    assert "rank 1 did not take part within 0.4 s" in on_mesh(3, limit_a_call, hosts)[0]


def make_again_after_a_failure(mesh: Mesh, hosts: str) -> tuple[float, bool]:
    before = list_open()
    call_until_failure(mesh, hosts, 1, "aborting")
    for _ in range(3):
        with hosts_group(mesh, hosts) as group:
            values = torch.ones(10)
            dist.all_reduce(values, group=group, async_op=True).wait()
        del group
    return float(values[0]), list_open() == before


def test_a_new_group_works_after_one_has_failed_and_nothing_stays_open():
    assert on_mesh(4, make_again_after_a_failure, "aabb") == [(4.0, True)] * 4


def fork_and_call(mesh: Mesh, hosts: str) -> tuple[int, float]:
    with hosts_group(mesh, hosts) as group:
        return use_in_a_fork(group, mesh)


def test_a_forked_process_cannot_use_or_damage_a_hierarchical_group():
    assert on_mesh(3, fork_and_call, "aab") == [(0, 3.0)] * 3

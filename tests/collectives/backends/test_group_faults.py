"""A rank that is killed, stopped, aborts, closes or makes another call ends the waits of all others, by its name."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives.backends.shared_groups import make_group, shared_group
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes import Pool, on_mesh

from rankless.collectives.backends import close_shared_memory_group
from rankless.errors import CollectiveError
from rankless.parallel.mesh import Mesh

COUNTS = [10, 100_000, 1_000_000]


@contextmanager
def own_workers(size: int) -> Iterator[Pool]:
    """Workers for one test, which may end."""
    pool = Pool(size)
    try:
        yield pool
    finally:
        pool.close()


def make_calls(group: Any, rank: int, number: int) -> None:
    """Make a collective of each size, or send a message around."""
    size = group.size()
    values = torch.ones(COUNTS[number % len(COUNTS)])
    if number % 4 == 0:
        dist.all_reduce(values, group=group)
    elif number % 4 == 1:
        dist.broadcast(values, group_src=number % size, group=group)
    elif number % 4 == 2:
        works = [
            dist.isend(values, group=group, group_dst=(rank + 1) % size),
            dist.irecv(torch.zeros_like(values), group=group, group_src=(rank - 1) % size),
        ]
        for work in works:
            work.wait()
    else:
        work = dist.all_reduce(values, group=group, async_op=True)
        assert work is not None
        work.wait()


def call_until_failure(mesh: Mesh, ending_rank: int, last_call: int, how: str) -> str:
    """Make calls until one rank ends; return the error."""
    group = make_group(mesh, list(range(mesh.size)))
    for number in range(last_call + 8):
        if number == last_call and mesh.rank == ending_rank:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif how == "aborting":
                group.abort()
            elif how == "closing":
                group.shutdown()
        try:
            make_calls(group, mesh.rank, number)
        except CollectiveError as error:
            with pytest.raises(CollectiveError):
                dist.barrier(group=group)
            close_shared_memory_group(group)
            return str(error)
    return ""


@settings(max_examples=4, deadline=None)
@given(ending_rank=st.integers(0, 2), last_call=st.integers(0, 7))
def test_a_killed_rank_ends_the_calls_of_all_others_by_name(ending_rank: int, last_call: int):
    with own_workers(3) as pool:
        answers = pool.call(call_until_failure, (ending_rank, last_call, "killed"))
    for rank, answer in enumerate(answers):
        if rank == ending_rank:
            assert isinstance(answer, RuntimeError)
        else:
            assert f"the process of rank {ending_rank} has ended" in str(answer)


@settings(max_examples=6, deadline=None)
@given(ending_rank=st.integers(0, 2), last_call=st.integers(0, 7))
def test_an_aborting_rank_ends_the_calls_of_all_ranks(ending_rank: int, last_call: int):
    for answer in on_mesh(3, call_until_failure, ending_rank, last_call, "aborting"):
        assert f"rank {ending_rank} aborted the group" in answer


@settings(max_examples=4, deadline=None)
@given(ending_rank=st.integers(0, 2), last_call=st.integers(0, 7))
def test_a_rank_that_closes_the_group_ends_the_calls_of_all_others(ending_rank: int, last_call: int):
    for answer in on_mesh(3, call_until_failure, ending_rank, last_call, "closing"):
        assert f"rank {ending_rank} has closed the group" in answer


def call_beside_a_stopped_rank(mesh: Mesh, stopped_rank: int) -> str:
    group = make_group(mesh, list(range(mesh.size)), timeout_seconds=0.5)
    processes: list[int] = [0] * mesh.size
    dist.all_gather_object(processes, os.getpid(), group=mesh.group)
    dist.all_reduce(torch.ones(10), group=group)
    if mesh.rank == stopped_rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.raises(CollectiveError) as caught:
        dist.all_reduce(torch.ones(100_000), group=group)
    if mesh.rank != stopped_rank:
        os.kill(processes[stopped_rank], signal.SIGCONT)
    close_shared_memory_group(group)
    return str(caught.value)


@pytest.mark.parametrize("stopped_rank", [0, 2])
def test_a_stopped_rank_ends_the_calls_of_all_others_after_the_timeout(stopped_rank: int):
    for answer in on_mesh(3, call_beside_a_stopped_rank, stopped_rank):
        assert f"rank {stopped_rank} did not take part within 0.5 s" in answer


def rebuild_after_a_failure(mesh: Mesh) -> float:
    call_until_failure(mesh, 1, 2, "aborting")
    with shared_group(mesh) as group:
        values = torch.ones(10)
        dist.all_reduce(values, group=group)
        return float(values[0])


def test_a_new_group_works_after_one_has_failed():
    assert on_mesh(3, rebuild_after_a_failure) == [3.0] * 3


def make_another_call(how: str, group: Any, rank: int) -> None:
    """Make a call that does not match the other rank's."""
    if how == "lengths":
        dist.all_reduce(torch.ones(10 + rank), group=group)
    elif how == "dtypes":
        dist.all_reduce(torch.ones(10, dtype=[torch.float32, torch.int32][rank]), group=group)
    elif how == "collectives":
        dist.broadcast(torch.ones(10), 0, group=group) if rank == 0 else dist.all_reduce(torch.ones(10), group=group)
    elif how == "gathered sizes":
        dist.all_gather([torch.zeros(2), torch.zeros(2 + rank)], torch.ones(2 + rank), group=group)
    elif rank == 0:
        dist.send(torch.ones(2), 1, group=group)
    else:
        dist.recv(torch.ones(3), 0, group=group)
    dist.barrier(group=group)


def call_something_else(mesh: Mesh, how: str) -> str:
    group = make_group(mesh, list(range(mesh.size)))
    with pytest.raises(CollectiveError) as caught:
        make_another_call(how, group, mesh.rank)
    close_shared_memory_group(group)
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("lengths", "all_reduce(SUM, float32, 11 values)"),
        ("dtypes", "all_reduce(SUM, int32, 10 values)"),
        ("collectives", "broadcast(root 0, 40 bytes)"),
        ("gathered sizes", "it sends 12 bytes"),
        ("messages", "a message of 12 bytes"),
    ],
)
def test_calls_that_do_not_match_raise_on_all_ranks_and_say_what_differs(how: str, found: str):
    answers = on_mesh(2, call_something_else, how)
    assert any(found in answer for answer in answers), answers


def leave_by_an_exception(mesh: Mesh) -> str:
    group = make_group(mesh, list(range(mesh.size)))
    if mesh.rank == 0:
        # As Ctrl-C would while the rank waits.
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            dist.all_reduce(torch.ones(10), group=group)
        dist.barrier(group=mesh.group)
        close_shared_memory_group(group)
        return ""
    dist.barrier(group=mesh.group)
    with pytest.raises(CollectiveError) as caught:
        dist.all_reduce(torch.ones(10), group=group)
    close_shared_memory_group(group)
    return str(caught.value)


def test_a_rank_that_is_interrupted_in_a_collective_ends_the_group():
    assert "rank 0 left a collective because of an exception" in on_mesh(2, leave_by_an_exception)[1]

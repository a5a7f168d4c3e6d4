"""Messages of any size, in any order of tags, arrive whole; a rank that ends fails the messages that wait for it."""

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives.backends.shared_groups import make_group, shared_group
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes import Pool, on_mesh

from rankless.collectives.backends import close_shared_memory_group
from rankless.collectives.backends.message_transfers import RingLayout
from rankless.errors import CollectiveError, ConfigError
from rankless.parallel.mesh import Mesh


def make_message(rank: int, tag: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + tag)
    return torch.randint(0, 255, (size,), dtype=torch.uint8, generator=generator)


def exchange_messages(mesh: Mesh, sizes: list[int], order: list[int]) -> None:
    """Each rank sends all messages to each other rank, each with its tag, and receives them in another order."""
    others = [rank for rank in range(mesh.size) if rank != mesh.rank]
    with shared_group(mesh) as group:
        works: list[Any] = []
        for tag, size in enumerate(sizes):
            works += [dist.isend(make_message(mesh.rank, tag, size), rank, group=group, tag=tag) for rank in others]
        dist.barrier(group=group)
        for tag in order:
            for rank in others:
                received = torch.zeros(sizes[tag], dtype=torch.uint8)
                dist.recv(received, rank, group=group, tag=tag)
                assert torch.equal(received, make_message(rank, tag, sizes[tag]))
        for work in works:
            work.wait()


@settings(max_examples=6, deadline=None)
@given(data=st.data(), sizes=st.lists(st.one_of(st.integers(0, 40), st.integers(0, 1_200_000)), min_size=1, max_size=8))
def test_messages_of_any_size_arrive_in_any_order_of_tags(data: st.DataObject, sizes: list[int]):
    order = data.draw(st.permutations(range(len(sizes))))
    on_mesh(2, exchange_messages, sizes, order)


@pytest.mark.parametrize("rest", range(0, 17, 4))
def test_a_ring_that_has_less_space_than_a_header_is_no_obstacle(rest: int):
    on_mesh(2, exchange_messages, [RingLayout(2).ring_bytes - 16 - rest, 100, 3], [0, 1, 2])


def wait_for_the_dead(mesh: Mesh, how: str) -> str:
    group = make_group(mesh, list(range(mesh.size)))
    work: Any = None
    if how == "from one" and mesh.rank == 0:
        work = dist.irecv(torch.zeros(3), 1, group=group)
    elif how == "to one" and mesh.rank == 0:
        work = dist.isend(torch.zeros(1_000_000), 1, group=group)
    elif how == "from any":
        work = dist.irecv(torch.zeros(3), group=group) if mesh.rank == 0 else None
    dist.barrier(group=group)
    if mesh.rank != 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CollectiveError) as caught:
        work.wait()
    close_shared_memory_group(group)
    return str(caught.value)


@pytest.mark.parametrize("how", ["from one", "to one", "from any"])
@pytest.mark.ci_sample(1)
def test_a_message_that_waits_for_an_ended_rank_fails_by_name(how: str):
    pool = Pool(2)
    try:
        answers = pool.call(wait_for_the_dead, (how,))
    finally:
        pool.close()
    assert "the process of rank 1 has ended" in str(answers[0])


def call_with_wrong_arguments(mesh: Mesh) -> float:
    """Refused arguments leave the group usable."""
    with shared_group(mesh) as group:
        with pytest.raises(ConfigError, match="AVG of torch"):
            dist.all_reduce(torch.ones(3, dtype=torch.int32), dist.ReduceOp.AVG, group=group)
        with pytest.raises(ConfigError, match="BAND of torch"):
            dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND, group=group)
        with pytest.raises(ConfigError, match="another rank"):
            group.send([torch.ones(3)], mesh.rank, 0)
        with pytest.raises(ConfigError, match="values in the output"):
            dist.all_gather_single(torch.ones(3), torch.ones(3), group=group)
        with pytest.raises(ConfigError, match="split sizes"):
            dist.all_to_all_single(torch.ones(4), torch.ones(4), [1, 1], [2, 2], group=group)
        with pytest.raises(ConfigError, match="dense"):
            group.broadcast([torch.ones(3).to_sparse()])
        values = torch.ones(3)
        dist.all_reduce(values, group=group)
        return float(values[0])


def test_arguments_that_are_refused_leave_the_group_usable():
    assert on_mesh(2, call_with_wrong_arguments) == [2.0, 2.0]

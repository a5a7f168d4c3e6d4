"""Operations of a group run in the order in which they were started, synchronous or not; futures and works agree."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives.backends.shared_groups import shared_group
from support.processes import on_mesh

from rankless.errors import CollectiveError
from rankless.parallel.mesh import Mesh


def chain_operations(mesh: Mesh) -> list[float]:
    """Each operation changes the same tensor, so that only one order gives the result."""
    with shared_group(mesh) as group:
        values = torch.full((100_000,), 1.0)
        works: list[Any] = []
        for _ in range(3):
            works.append(dist.all_reduce(values, group=group, async_op=True))
            works.append(dist.all_reduce(values, dist.ReduceOp.PRODUCT, group=group, async_op=True))
        dist.all_reduce(values, group=group)  # after those that are queued
        found = [float(values.min()), float(values.max())]
        assert all(work.is_completed() and work.is_success() and work.exception() is None for work in works)
        for work in reversed(works):
            assert work.wait()
        return found


def test_operations_run_in_the_order_in_which_they_were_started():
    value = 1.0
    for _ in range(3):
        value = (2 * value) ** 2
    assert on_mesh(2, chain_operations) == [[2 * value] * 2] * 2


def use_futures(mesh: Mesh) -> list[float]:
    with shared_group(mesh) as group:
        values = torch.ones(100_000)
        work = dist.all_reduce(values, group=group, async_op=True)
        assert work is not None
        # A callback may start the next operation of the same group.
        following = work.get_future().then(
            lambda future: dist.all_reduce(future.value()[0], group=group, async_op=True).get_future()
        )
        inner = following.wait().wait()
        late = work.get_future()
        assert late.done()
        return [float(inner[0][0]), float(late.value()[0][0])]


def test_futures_hold_the_outputs_and_may_start_operations():
    assert on_mesh(2, use_futures) == [[4.0, 4.0]] * 2


def wait_too_shortly(mesh: Mesh) -> None:
    with shared_group(mesh) as group:
        if mesh.rank == 0:
            work: Any = dist.irecv(torch.zeros(3), group=group, group_src=1)
            with pytest.raises(CollectiveError, match=r"within 0\.01 s"):
                work.wait(timedelta(seconds=0.01))
            dist.barrier(group=group)
            assert work.wait(timedelta(seconds=20))
        else:
            dist.barrier(group=group)
            dist.send(torch.ones(3), group=group, group_dst=0)


def test_a_wait_with_a_timeout_ends_and_the_operation_goes_on():
    on_mesh(2, wait_too_shortly)


def use_inference_mode(mesh: Mesh) -> list[float]:
    with torch.inference_mode():
        values, other = torch.ones(5), torch.ones(5)
    with shared_group(mesh) as group:
        dist.all_reduce(values, group=group)
        work = dist.all_reduce(other, group=group, async_op=True)
        assert work is not None
        work.wait()
        parameter = torch.nn.Parameter(torch.ones(5))
        dist.all_reduce(parameter, group=group)
    return [float(values[0]), float(other[0]), float(parameter[0])]


def test_tensors_of_inference_mode_and_parameters_are_reduced():
    assert on_mesh(2, use_inference_mode) == [[2.0, 2.0, 2.0]] * 2


def messages_and_collectives_cross(mesh: Mesh) -> bool:
    """A large message needs the receiver, which is in a collective first; then both ranks send before they receive."""
    with shared_group(mesh) as group:
        sent, received = torch.arange(1_000_000.0) + mesh.rank, torch.zeros(1_000_000)
        if mesh.rank == 0:
            work = dist.isend(sent, group=group, group_dst=1)
            dist.all_reduce(torch.ones(10), group=group)
        else:
            dist.all_reduce(torch.ones(10), group=group)
            work = dist.irecv(received, group=group, group_src=0)
        assert work is not None
        work.wait()
        works = [dist.isend(sent, group=group, group_dst=1 - mesh.rank)]
        works.append(dist.irecv(received, group=group, group_src=1 - mesh.rank))
        for work in works:
            assert work is not None
            work.wait()
        return bool(torch.equal(received, torch.arange(1_000_000.0) + 1 - mesh.rank))


def test_messages_go_on_while_their_rank_is_in_a_collective():
    assert on_mesh(2, messages_and_collectives_cross) == [True, True]

import os

import pytest
import torch
import torch.distributed as dist
from support.processes import on_mesh

from rankless.errors import DataError
from rankless.parallel.mesh import Mesh


def sum_of_ranks(mesh: Mesh, factor: int) -> tuple[int, float, int]:
    tensor = torch.tensor(float(mesh.rank * factor))
    dist.all_reduce(tensor, group=mesh.group)
    return mesh.rank, tensor.item(), os.getpid()


def raise_on_rank_one(mesh: Mesh) -> None:
    if mesh.rank == 1:
        raise DataError(expected="rank 0", found=f"rank {mesh.rank}", fix="none")
    dist.barrier(group=mesh.group)


def die_on_rank_zero(mesh: Mesh) -> None:
    if mesh.rank == 0:
        os._exit(9)
    raise RuntimeError("rank 1 too")


@pytest.mark.slow
def test_workers_return_results_by_rank_and_are_reused():
    first, second = on_mesh(3, sum_of_ranks, 2), on_mesh(3, sum_of_ranks, 4)
    assert [answer[:2] for answer in first] == [(0, 6.0), (1, 6.0), (2, 6.0)]
    assert [answer[2] for answer in first] == [answer[2] for answer in second]


@pytest.mark.slow
def test_a_workers_error_is_raised_with_its_rank_while_the_other_hangs():
    with pytest.raises(DataError, match="found:    rank 1") as raised:
        on_mesh(2, raise_on_rank_one)
    assert "on rank 1 of 2" in raised.value.__notes__[0]
    assert [answer[1] for answer in on_mesh(2, sum_of_ranks, 1)] == [1.0, 1.0]


@pytest.mark.slow
def test_a_worker_that_dies_is_not_reused_whatever_the_others_raise():
    with pytest.raises(RuntimeError, match="rank 0 died with exit code 9"):
        on_mesh(2, die_on_rank_zero)
    assert [answer[1] for answer in on_mesh(2, sum_of_ranks, 1)] == [1.0, 1.0]

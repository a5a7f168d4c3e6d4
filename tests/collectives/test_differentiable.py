"""Gradients through collectives equal those of one process that has all ranks' tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.processes import on_mesh
from torch import Tensor
from torch.distributed import ReduceOp

import rankless.collectives.differentiable as differentiable
from rankless.errors import ConfigError
from rankless.parallel.mesh import Mesh


def make_input(rank: int, size: int, case: str) -> Tensor:
    rows = {"uneven all_gather": 1 + rank, "uneven reduce_scatter": size * (size + 1) // 2}.get(case, size * 2)
    if case == "uneven all_to_all":
        rows = sum(1 + rank + other for other in range(size))
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def weighted_loss(rank: int, result: Tensor) -> Tensor:
    """Return a loss of a rank's result that is not linear, and different on each rank."""
    return ((rank + 1) * result.sin() * result).sum()


def lengths(size: int) -> list[int]:
    return [1 + rank for rank in range(size)]


def parts(rank: int, size: int) -> list[int]:
    return [1 + rank + other for other in range(size)]


Run = Callable[[Tensor, int, int], Tensor]
Whole = Callable[[list[Tensor], int], list[Tensor]]


def plain_scatter(op: Any, uneven: bool = False) -> Whole:
    def whole(inputs: list[Tensor], size: int) -> list[Tensor]:
        summed = sum(inputs) / (size if op == ReduceOp.AVG else 1)
        return list(torch.as_tensor(summed).split(lengths(size) if uneven else 2))

    return whole


def plain_exchange(uneven: bool) -> Whole:
    def whole(inputs: list[Tensor], size: int) -> list[Tensor]:
        split = [tensor.split(parts(rank, size) if uneven else 2) for rank, tensor in enumerate(inputs)]
        return [torch.cat([pieces[rank] for pieces in split]) for rank in range(size)]

    return whole


CASES: dict[str, tuple[Run, Whole]] = {
    "all_reduce": (lambda x, *_: differentiable.all_reduce(x), lambda xs, n: [sum(xs)] * n),
    "average": (
        lambda x, *_: differentiable.all_reduce(x, ReduceOp.AVG),
        lambda xs, n: [sum(xs) / n] * n,
    ),
    "reduce": (
        lambda x, *_: differentiable.reduce(x, 1),
        lambda xs, n: [sum(xs) if rank == 1 else torch.zeros_like(xs[0]) for rank in range(n)],
    ),
    "broadcast": (lambda x, *_: differentiable.broadcast(x, 1), lambda xs, n: [xs[1]] * n),
    "all_gather": (lambda x, *_: differentiable.all_gather(x), lambda xs, n: [torch.cat(xs)] * n),
    "uneven all_gather": (
        lambda x, _, n: differentiable.all_gather(x, lengths=lengths(n)),
        lambda xs, n: [torch.cat(xs)] * n,
    ),
    "reduce_scatter": (lambda x, *_: differentiable.reduce_scatter(x), plain_scatter(ReduceOp.SUM)),
    "average and scatter": (
        lambda x, *_: differentiable.reduce_scatter(x, ReduceOp.AVG),
        plain_scatter(ReduceOp.AVG),
    ),
    "uneven reduce_scatter": (
        lambda x, _, n: differentiable.reduce_scatter(x, lengths=lengths(n)),
        plain_scatter(ReduceOp.SUM, uneven=True),
    ),
    "all_to_all": (lambda x, *_: differentiable.all_to_all(x), plain_exchange(uneven=False)),
    "uneven all_to_all": (
        lambda x, rank, n: differentiable.all_to_all(x, parts(rank, n), parts(rank, n)),
        plain_exchange(uneven=True),
    ),
}


def run_on_rank(mesh: Mesh, case: str) -> tuple[Tensor, Tensor]:
    mine = make_input(mesh.rank, mesh.size, case).requires_grad_()
    result = CASES[case][0](mine, mesh.rank, mesh.size)
    weighted_loss(mesh.rank, result).backward()
    assert mine.grad is not None
    return result.detach(), mine.grad


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_equal_those_of_one_process(case: str, size: int):
    inputs = [make_input(rank, size, case).requires_grad_() for rank in range(size)]
    results = CASES[case][1](inputs, size)
    torch.stack([weighted_loss(rank, result) for rank, result in enumerate(results)]).sum().backward()
    for (found, gradient), result, plain in zip(on_mesh(size, run_on_rank, case), results, inputs, strict=True):
        torch.testing.assert_close(found, result.detach(), rtol=1e-12, atol=0)
        wanted = torch.zeros_like(plain) if plain.grad is None else plain.grad
        torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-14)


def all_reduce_max(_mesh: Mesh) -> None:
    differentiable.all_reduce(torch.ones(2, requires_grad=True), ReduceOp.MAX)


def test_a_reduction_that_is_not_linear_raises():
    with pytest.raises(ConfigError, match="SUM or AVG in a differentiable all_reduce"):
        on_mesh(2, all_reduce_max)

"""Cases of operators: a function of a batch, checked on simulated ranks against one device in float64."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from simulated_ranks import Outcome, assert_same_as_plain
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """A function of a batch `x` whose rows have the given shape; gradients flow through it to a factor of x."""

    function: Callable[[Tensor], Any]
    shape: tuple[int, ...] = (6,)
    rows: int = 7
    splits: bool = False
    """Whether a test asserts that no rank gets the whole of a value that is split."""


def weighted(value: Tensor) -> Tensor:
    """Return a sum in which every element has a different weight."""
    weights = torch.sin(torch.arange(1.0, value.numel() + 1)).view(value.shape)
    return (value * weights).sum()


def batch_last(function: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    return lambda x: function(x.movedim(0, -1))


def batch_second(function: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    return lambda x: function(x.transpose(0, 1))


def labels_of(x: Tensor, classes: int) -> Tensor:
    """Return integers below `classes` that are sharded like the rows of x."""
    return (x.detach().flatten(1).sum(1).abs() * 1000).long() % classes


def numbers(*shape: int) -> Tensor:
    return torch.sin(torch.arange(1.0, math.prod(shape) + 1) * 7).view(shape)


def split(function: Callable[[Tensor], Any], shape: tuple[int, ...] = (6,), rows: int = 7) -> Case:
    """Return a case in which every value stays split."""
    return Case(function, shape, rows, splits=True)


def check_function(case: Case, ranks: int, rows: int | None = None) -> Outcome:
    """Return the outcome of a case after asserting that it equals one device's; `rows` may leave ranks without any."""
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    try:
        model = nn.Module()
        model.factor = nn.Parameter(torch.rand(case.shape) + 0.5)
        return assert_same_as_plain(
            lambda x: weighted(case.function(x * model.factor)),
            {"model": model},
            [torch.randn(case.rows if rows is None else rows, *case.shape)],
            ranks,
            splits_few_rows=rows is not None,
        )
    finally:
        torch.set_default_dtype(torch.float32)

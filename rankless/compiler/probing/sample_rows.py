"""The sample data of an experiment with an operator: numbers of several kinds, and rows arranged in several ways."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rankless.compiler.ir.logical_program import LogicalValue
from rankless.compiler.ir.memory_order import find_memory_order, order_memory


def draw(value: LogicalValue, number: int, limit: int, generator: torch.Generator) -> Tensor:
    """Return a tensor of this shape, layout and dtype with the numbers of a data set.

    Args:
        value: The tensor.
        number: Which data set; they repeat.
        limit: Integers are below this, so that they may be indices.
        generator: Draws the numbers.
    """
    if value.dtype == torch.bool:
        plain = torch.randint(0, 2, value.shape, generator=generator, device="cpu").bool()
        plain = (plain, torch.ones_like(plain), torch.zeros_like(plain), ~plain, plain)[number % len(FLOATS)]
    elif value.dtype.is_floating_point or value.dtype.is_complex:
        plain = FLOATS[number % len(FLOATS)](value.shape, generator)
        if value.dtype.is_complex:
            plain = torch.complex(plain, FLOATS[number % len(FLOATS)](value.shape, generator))
    else:
        plain = torch.randint(0, limit, value.shape, generator=generator, device="cpu")
    order = find_memory_order(value.shape, value.strides)
    plain = plain.to(value.dtype)
    return plain if order is None else order_memory(plain, order)


def draw_normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return normal numbers."""
    return torch.randn(tuple(shape), dtype=torch.float64, generator=generator, device="cpu")


def draw_positive(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return numbers between 0.1 and 0.9."""
    return torch.rand(tuple(shape), dtype=torch.float64, generator=generator, device="cpu") * 0.8 + 0.1


def draw_wide(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return large numbers, a third of them zero."""
    numbers = draw_normal(shape, generator) * 100
    return torch.where(torch.rand(tuple(shape), generator=generator, device="cpu") < 1 / 3, 0.0, numbers)


def draw_definite(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return symmetric positive definite matrices, if the last dims have equal sizes; else positive numbers."""
    numbers = draw_positive(shape, generator)
    if len(shape) < 2 or shape[-1] != shape[-2]:
        return numbers
    return (numbers + numbers.mT) / 2 + shape[-1] * torch.eye(shape[-1], dtype=torch.float64, device="cpu")


FLOATS = (draw_normal, draw_positive, draw_wide, draw_definite, draw_definite)
"""How the data sets draw their numbers."""


def repeat_row(value: Tensor, dim: int) -> Tensor:
    """Return equal rows."""
    return value.narrow(dim, 0, 1).expand_as(value)


def repeat_rows(value: Tensor, dim: int) -> Tensor:
    """Return rows that recur after some others, so that every part has rows that another one has too."""
    return value.index_select(dim, torch.arange(value.shape[dim], device=value.device) % max(2, value.shape[dim] // 3))


def sort_rows(value: Tensor, dim: int) -> Tensor:
    """Return rows whose entries grow from row to row."""
    return value if value.is_complex() else value.sort(dim)[0]


def reverse_rows(value: Tensor, dim: int) -> Tensor:
    """Return rows whose entries fall from row to row."""
    return sort_rows(value, dim).flip(dim)


def keep_one_row(value: Tensor, dim: int) -> Tensor:
    """Return rows of zeros, but for the last."""
    found = torch.zeros_like(value)
    found.select(dim, -1).copy_(value.select(dim, -1))
    return found


def enlarge(value: Tensor, dim: int) -> Tensor:
    """Return rows of which each is larger than the one before, from small to very large numbers."""
    if not value.is_floating_point():
        return value
    sizes = [1 if place == dim else -1 for place in range(value.dim())]
    steps = torch.linspace(-3, 4, value.shape[dim], device=value.device).to(value.dtype)
    return value * (10.0**steps).view([len(steps) if size == 1 else 1 for size in sizes])


def round_rows(value: Tensor, dim: int) -> Tensor:  # noqa: ARG001
    """Return rows of few numbers, as classes and switches have them."""
    return value.round() if value.is_floating_point() else value


def make_zeros(value: Tensor, dim: int) -> Tensor:  # noqa: ARG001
    """Return rows of zeros."""
    return torch.zeros_like(value)


def make_ones(value: Tensor, dim: int) -> Tensor:  # noqa: ARG001
    """Return rows of ones."""
    return torch.ones_like(value)


ARRANGEMENTS = (
    repeat_row,
    repeat_rows,
    sort_rows,
    reverse_rows,
    keep_one_row,
    enlarge,
    round_rows,
    make_zeros,
    make_ones,
)
"""What further data sets do with the rows that they draw."""

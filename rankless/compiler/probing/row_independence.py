"""Find by experiment whether an operator treats each row of its arguments by itself; see decision 0027.

An operator is called on whole arguments, on parts of them, and on arguments in which one row has been replaced. Its
rows are independent if the results of the parts are parts of the whole result, and if no other row has changed.

Random rows are all different and in no order, and real ones are not: so there are data sets of equal, sorted and
constant rows too. While the program runs, `operator_probe` compares on real rows.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rankless.compiler.ir.logical_program import LogicalValue
from rankless.compiler.ir.memory_order import find_memory_order, order_memory

Function = Callable[[Sequence[Tensor]], Any]
Dims = tuple[int | None, ...]
"""For each tensor the dim along which it is divided, or None for a whole tensor."""

BOUNDS = {torch.float64: 1e-12, torch.complex128: 1e-12, torch.float32: 2e-6, torch.complex64: 2e-6}
"""How far the result of a part may lie from that of the whole, relative to its largest entry: kernels add in other
orders for other numbers of rows. For types that are not listed: a rounding of a number near one."""
MIN_DATA_SETS = 2
"""Data sets on which the operator must run: some reject most numbers."""
SEED = 0


def find_output_dims(
    function: Function, values: Sequence[LogicalValue], dims: Dims, lengths: Sequence[int]
) -> Dims | None:
    """Return the dims along which the results are divided if the arguments are, or None if they cannot be.

    Args:
        function: The operator. It gets its tensors on the CPU and returns tensors, None, or lists of these.
        values: The shapes, strides and dtypes of its tensors.
        dims: The dim of each tensor along which ranks divide it, None for a tensor that every rank has whole.
        lengths: The number of rows of each rank.
    """
    if len(lengths) < 2 or min(lengths) < 1:
        return None
    search = _Search(function, dims, lengths)
    generator = torch.Generator().manual_seed(SEED)
    limit = min((size for value in values for size in value.shape if size), default=1)
    for number in range(len(FLOATS)):
        inputs = [draw(value, number, limit, generator) for value in values]
        others = [draw(value, number + 1, limit, generator) for value in values]
        if not search.narrow_down(inputs, others):
            return None
    if search.result() is None:
        return None
    for number, arrange in enumerate(ARRANGEMENTS):
        given = zip([draw(value, number % 2, limit, generator) for value in values], dims, strict=True)
        inputs = [item if dim is None else copy_in_order(arrange(item, dim)) for item, dim in given]
        others = [draw(value, number + 1, limit, generator) for value in values]
        if not search.narrow_down(inputs, others):
            return None
    return search.result()


def list_results(result: Any) -> list[Any]:
    """Return the results of an operator, with None for absent ones."""
    leaves: list[Any] = pytree.tree_leaves(result, is_leaf=lambda item: item is None)
    return leaves


class _Search:
    """The dims of the results that agree with everything seen so far."""

    def __init__(self, function: Function, dims: Dims, lengths: Sequence[int]) -> None:
        self._function = function
        self._dims = dims
        self._size = sum(lengths)
        self._divisions = tuple(dict.fromkeys([tuple(lengths), tuple(reversed(lengths)), (1, self._size - 1)]))
        self._possible: list[set[int]] | None = None
        self._absent: list[bool] = []
        self._runs = 0
        self._responds = False

    def narrow_down(self, inputs: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
        """Run the operator on one data set, with rows of another in place of its own. Return False if it fails."""
        whole = self._try(inputs)
        if whole is None:
            return True  # it rejects these numbers
        again = self._try(inputs)
        if again is None or not all(map(same_bits, whole, again)):
            return False  # it draws random numbers, or keeps a state
        self._runs += 1
        if self._possible is None:
            self._absent = [item is None for item in whole]
            self._possible = [
                set() if item is None else {dim for dim, size in enumerate(item.shape) if size == self._size}
                for item in whole
            ]
        if [item is None for item in whole] != self._absent:
            return False
        return self._compare_parts(inputs, whole) and self._compare_replaced(inputs, others, whole)

    def result(self) -> Dims | None:
        """Return a dim for each result, if there is enough evidence."""
        if self._possible is None or self._runs < MIN_DATA_SETS or not self._responds:
            return None
        return tuple(
            None if absent else min(options) for options, absent in zip(self._possible, self._absent, strict=True)
        )

    def _compare_parts(self, inputs: Sequence[Tensor], whole: Sequence[Tensor | None]) -> bool:
        for lengths in self._divisions:
            parts = []
            start = 0
            for length in lengths:
                part = self._try(self._take(inputs, start, length))
                if part is None or [item is None for item in part] != self._absent:
                    return False
                parts.append(part)
                start += length
            for place, item in enumerate(whole):
                if item is not None:
                    pieces = [part[place] for part in parts]
                    self._keep(place, partial(is_divided, pieces, item, lengths))
        return self._is_possible()

    def _compare_replaced(
        self, inputs: Sequence[Tensor], others: Sequence[Tensor], whole: Sequence[Tensor | None]
    ) -> bool:
        for row in sorted({0, self._size // 2, self._size - 1}):
            for replaced in self._replace(inputs, others, row):
                found = self._try(replaced)
                if found is None:
                    continue  # it rejects this row, as a rank with this row would
                for place, (item, changed) in enumerate(zip(whole, found, strict=True)):
                    if item is None or changed is None or changed.shape != item.shape:
                        if item is not changed:
                            return False
                        continue
                    self._responds = self._responds or not same_bits(item, changed)
                    self._keep(place, partial(is_equal_but_for, item, changed, row))
        return self._is_possible()

    def _keep(self, place: int, test: Callable[[int], bool]) -> None:
        assert self._possible is not None
        self._possible[place] = {dim for dim in self._possible[place] if test(dim)}

    def _is_possible(self) -> bool:
        assert self._possible is not None
        return bool(self._absent) and all(
            options or absent for options, absent in zip(self._possible, self._absent, strict=True)
        )

    def _take(self, inputs: Sequence[Tensor], start: int, length: int) -> list[Tensor]:
        return [
            item if dim is None else copy_in_order(item.narrow(dim, start, length))
            for item, dim in zip(inputs, self._dims, strict=True)
        ]

    def _replace(self, inputs: Sequence[Tensor], others: Sequence[Tensor], row: int) -> Iterator[list[Tensor]]:
        """Yield arguments with another row: with one of other numbers, and with one that is not a number."""
        for spoil in (False, True):
            replaced = []
            for item, other, dim in zip(inputs, others, self._dims, strict=True):
                changed = copy_in_order(item)
                if dim is not None:
                    is_spoiled = spoil and (item.is_floating_point() or item.is_complex())
                    changed.select(dim, row).copy_(
                        torch.full_like(other.select(dim, row), math.nan) if is_spoiled else other.select(dim, row)
                    )
                replaced.append(changed)
            yield replaced

    def _try(self, inputs: Sequence[Tensor]) -> list[Tensor | None] | None:
        """Return the operator's results, or None if it fails, changes an argument or returns anything but tensors."""
        given = [copy_in_order(item) for item in inputs]
        state = torch.get_rng_state()
        try:
            found = list_results(self._function(given))
        except Exception:
            return None
        is_pure = torch.equal(torch.get_rng_state(), state) and all(map(same_bits, given, inputs))
        is_plain = all(item is None or (isinstance(item, Tensor) and item.layout == torch.strided) for item in found)
        return found if is_pure and is_plain else None


def copy_in_order(value: Tensor) -> Tensor:
    """Return a copy whose dims lie in memory in the same order, without gaps."""
    order = find_memory_order(value.shape, value.stride())
    return value.clone(memory_format=torch.contiguous_format) if order is None else order_memory(value, order).clone()


def is_divided(pieces: Sequence[Tensor | None], whole: Tensor, lengths: Sequence[int], dim: int) -> bool:
    """Return whether the pieces are the parts of the whole along a dim, up to the rounding of its dtype."""
    found = []
    for piece, length in zip(pieces, lengths, strict=True):
        expected = [length if place == dim else size for place, size in enumerate(whole.shape)]
        if piece is None or list(piece.shape) != expected or piece.dtype != whole.dtype:
            return False
        found.append(piece)
    return is_close(torch.cat(found, dim), whole)


def is_close(found: Tensor, expected: Tensor, roundings: float = 1.0) -> bool:
    """Return whether two tensors are equal up to the rounding of their dtype, or several. Integers must be equal."""
    if not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(found, expected)
    wide, wanted = (
        torch.view_as_real(item.resolve_conj()) if item.is_complex() else item for item in (found, expected)
    )
    finite = torch.isfinite(wanted)
    if not same_bits(torch.where(finite, 0, wide), torch.where(finite, 0, wanted)):
        return False
    wide, wanted = wide[finite].double(), wanted[finite].double()
    bound = roundings * (BOUNDS.get(expected.dtype, 0.0) or torch.finfo(expected.dtype).eps)
    return not wanted.numel() or bool((wide - wanted).abs().max() <= bound * wanted.abs().max())


def same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    """Return whether two tensors have the same shape, dtype and numbers, where NaN equals NaN; or both are None."""
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    one, other = one.resolve_conj().resolve_neg(), other.resolve_conj().resolve_neg()
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    return bool(((one == other) | ((one != one) & (other != other))).all())


def is_equal_but_for(one: Tensor, other: Tensor, row: int, dim: int) -> bool:
    """Return whether two tensors have the same bits in all rows but one."""
    return same_bits(drop(one, dim, row), drop(other, dim, row))


def drop(value: Tensor, dim: int, row: int) -> Tensor:
    """Return a tensor without one row."""
    return torch.cat([value.narrow(dim, 0, row), value.narrow(dim, row + 1, value.shape[dim] - row - 1)], dim)


def draw(value: LogicalValue, number: int, limit: int, generator: torch.Generator) -> Tensor:
    """Return a tensor of this shape, layout and dtype with the numbers of a data set.

    Args:
        number: Which data set; they repeat.
        limit: Integers are below this, so that they may be indices.
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


def repeat_rows(value: Tensor, dim: int) -> Tensor:
    """Return rows that recur after some others, so that every part has rows that another one has too."""
    return value.index_select(dim, torch.arange(value.shape[dim], device=value.device) % max(2, value.shape[dim] // 3))


def sort_rows(value: Tensor, dim: int) -> Tensor:
    """Return rows whose entries grow from row to row."""
    return value if value.is_complex() else value.sort(dim)[0]


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


ARRANGEMENTS: tuple[Callable[[Tensor, int], Tensor], ...] = (
    lambda value, dim: value.narrow(dim, 0, 1).expand_as(value),  # equal rows
    repeat_rows,
    sort_rows,
    lambda value, dim: sort_rows(value, dim).flip(dim),  # entries that fall from row to row
    keep_one_row,
    enlarge,
    lambda value, _: value.round() if value.is_floating_point() else value,  # few numbers, as classes and switches are
    lambda value, _: torch.zeros_like(value),
    lambda value, _: torch.ones_like(value),
)
"""What further data sets do with the rows that they draw."""

"""Counts of selected rows in a local program: values that it computes while it runs.

See Note [counts of selected rows]. A count is taken from the first value that has it as a size. A size that depends on
counts then is a value that follows from them. Where a later value must have an equal count, the program compares them.
"""

from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any, Protocol

import sympy  # type: ignore[import-untyped]  # it has no stubs
import torch
from torch import fx
from torch.utils._sympy.printers import PythonPrinter

from rankless.compiler.ir import local_kernels
from rankless.compiler.ir.logical_program import LogicalValue
from rankless.compiler.ir.tensor_parts import list_parts
from rankless.compiler.selected_rows.selections import find_selection, is_reordered
from rankless.compiler.tracing.symbolic_sizes import (
    EXPRESSION_GLOBALS,
    READ_BY_JOB,
    find_traced_count,
    has_count,
    list_traced_counts,
)
from rankless.errors import CaptureError
from rankless.parallel.tensor_placement import (
    OnRank,
    Placement,
    Replicate,
    Shard,
    Sharding,
    is_absent,
    is_divided_along,
)

aten = torch.ops.aten


class LocalBuilder(Protocol):
    """What adds to the local graph of one rank."""

    @property
    def ranks(self) -> Sequence[int]:
        """The rank along each axis."""
        ...

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call of a function."""
        ...

    def redistribute(self, node: fx.Node, target: Sharding, reason: str) -> fx.Node:
        """Return the local value of a logical one in a sharding."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        ...

    @property
    def early_masks(self) -> frozenset[fx.Node]:
        """Masks that are known before what they select: selected rows are counted in them."""
        ...

    def all_gather(self, value: fx.Node, reason: str, size: int, number: int | None = None) -> fx.Node:
        """Add an all-gather of equal pieces, of `size` bytes each, along a new dim 0 and an axis."""
        ...


class SizeFromCounts:
    """Called with counts, returns a size that depends on them.

    Args:
        expression: The size as Python, in the names of the counts.
        names: These names.
    """

    __name__ = "size_from_counts"

    def __init__(self, expression: str, names: Sequence[str]) -> None:
        code = f"lambda {', '.join(names)}: {expression}"
        self._compute: Callable[..., Any] = eval(code, dict(EXPRESSION_GLOBALS))

    def __call__(self, *counts: int) -> Any:
        """Return the size."""
        return self._compute(*counts)


class CountCheck:
    """Called with counts of selected rows that the job combines, raises `CaptureError` if they do not fit.

    Args:
        expression: The condition as Python, in the names of the counts.
        names: These names.
        line: The script's line.
    """

    __name__ = "count_check"

    def __init__(self, expression: str, names: Sequence[str], line: str) -> None:
        self._holds = SizeFromCounts(expression, names)
        self._line = line

    def __call__(self, *counts: int) -> None:
        """Check the counts."""
        if not self._holds(*counts):
            raise CaptureError(
                expected="selected rows that are combined to be as many as each other, or as the rows of other values",
                found=f"selections of {' and '.join(map(str, counts))} rows",
                fix="select both with the same mask",
                where=self._line or None,
            )


class RowCounts:
    """The counts that a local graph has computed so far.

    Where axes divide the selected rows, a rank first knows its own number. Numbers of others are exchanged once they
    are needed: by a redistribution, or by a size of the whole. What needs them does so on all ranks.

    Args:
        builder: Adds to the graph.
    """

    def __init__(self, builder: LocalBuilder) -> None:
        self._builder = builder
        self._counts: dict[sympy.Symbol, fx.Node] = {}
        self._sizes: dict[sympy.Expr, fx.Node] = {}
        self._lines: dict[sympy.Symbol, str] = {}
        self._environment: Any = None
        self._checked: set[sympy.Expr] = set()
        self._owned: dict[sympy.Symbol, tuple[int, int]] = {}
        """The axis and the rank of selections that one rank makes, of which the others do not know the number yet."""
        self._divisions: dict[sympy.Symbol, Sharding] = {}
        """The sharding of the selected rows of which something is the number, without what divides other dims."""

    def define(self, node: fx.Node, local: fx.Node, sharding: Sharding) -> None:
        """Take the counts that a value is the first to have from its local value.

        Args:
            node: The logical value.
            local: The local value.
            sharding: The sharding of both.
        """
        value = node.meta["val"]
        shape: tuple[Any, ...] = value.shape if isinstance(value, LogicalValue) else ()
        owned = [(number, item.rank) for number, item in enumerate(sharding) if isinstance(item, OnRank)]
        for dim, size in enumerate(shape):
            symbol = find_traced_count(size)
            if owned and symbol is not None and symbol not in self._lines:
                self._owned[symbol] = owned[0]
                self._lines[symbol], self._environment = str(node.meta.get("line", "")), size.node.shape_env
                if not is_absent(sharding, self._builder.ranks):
                    self._counts[symbol] = self._builder.call(aten.sym_size.int, local, dim)
                continue
            division = keep_dim(sharding, dim)
            self.note_divisions(sharding)
            own = self._find_own(division)
            if own is not None and own not in self._counts:
                if find_mask(division) in self._builder.early_masks:
                    self._count_in_mask(division)
                else:
                    self._counts[own] = self._builder.call(aten.sym_size.int, local, dim)
            if symbol is None or symbol in self._lines:
                continue
            if own is None and is_divided(division):
                continue
            if own is None:
                self._counts[symbol] = self._builder.call(aten.sym_size.int, local, dim)
            else:
                self._divisions[symbol] = division
            self._lines[symbol], self._environment = str(node.meta.get("line", "")), size.node.shape_env

    def note_divisions(self, sharding: Sharding) -> None:
        """Remember how the selected rows of a value are divided, because their numbers may be needed."""
        for placement in sharding:
            if (selection := find_selection(placement)) is not None:
                division = keep_dim(sharding, selection_dim(placement))
                for count in selection.counts:
                    self._divisions.setdefault(require_count(count), division)

    def prepare_move(self, shape: Sequence[Any], before: Placement, after: Placement, number: int) -> None:
        """Exchange the numbers of selected rows that a move along an axis needs.

        Args:
            shape: The shape of what the ranks along the axis have together.
            before: The placement of the value.
            after: Its placement after the move.
            number: The number of the axis.
        """
        self.exchange(before)
        self.exchange(after)
        for size in shape if isinstance(before, OnRank) else ():
            for symbol in list_traced_counts(size):
                self._share(symbol, number)

    def _share(self, symbol: sympy.Symbol, number: int) -> None:
        """Send the number of rows that one rank along an axis has selected to the others, once."""
        axis, owner = self._owned.get(symbol, (None, 0))
        if axis == number:
            del self._owned[symbol]
            gathered = self._gather(self._counts.get(symbol, 0), number)
            self._counts[symbol] = self._builder.call(getitem, gathered, owner)

    def exchange(self, placement: Placement) -> None:
        """Exchange the numbers of selected rows that a placement has, of which one rank alone might need none."""
        for length in getattr(placement, "lengths", ()):
            for symbol in list_traced_counts(length):
                self._find_count(symbol)
                self._exchange(self._divisions[symbol])

    def find_start(self, placement: Shard, rank: int) -> Any:
        """Return the first row of a rank: a number, or a node for selected rows, also if it is the first of all."""
        if not has_count(placement.lengths):
            return placement.start(rank)
        self.exchange(placement)
        lengths = [self.resolve(item) for item in placement.lengths]
        return self._builder.call(sum, lengths[:rank])

    def list_parts(self, sharding: Sharding) -> tuple[Any, ...]:
        """Return this rank's part of a value as ranges of dims, also of selected rows."""
        if not any(isinstance(item, Shard) and has_count(item.lengths) for item in sharding):
            return list_parts(sharding, self._builder.ranks)
        starts: dict[int, list[Any]] = {}
        lengths: dict[int, int] = {}
        for placement, rank in zip(sharding, self._builder.ranks, strict=True):
            if isinstance(placement, Shard):
                starts.setdefault(placement.dim, []).append(self.find_start(placement, rank))
                lengths[placement.dim] = placement.lengths[rank]
        if is_absent(sharding, self._builder.ranks):
            starts[0], lengths[0] = [0], 0
        return tuple((dim, self._builder.call(sum, items), lengths[dim]) for dim, items in starts.items())

    def resolve(self, argument: Any) -> Any:
        """Return a call's argument with a node for each size that depends on counts."""
        return fx.node.map_aggregate(argument, self._resolve_size)

    def add_checks(self) -> None:
        """Check what the trace has assumed of counts, because operators rely on it.

        What the job's Python has read is checked already. Rows that one mask selects are as many.
        """
        assumed = [
            item for symbol in self._lines for item in self._environment.deferred_runtime_asserts.get(symbol, ())
        ]
        for expression in dict.fromkeys(item.expr for item in assumed if item.msg != READ_BY_JOB):
            symbols = sorted(expression.free_symbols, key=str)
            divisions = [self._divisions.get(item) for item in symbols]
            if expression in self._checked or not all(item in self._lines for item in symbols):
                continue
            if isinstance(expression, sympy.Eq) and divisions[0] is not None and divisions[0] == divisions[-1]:
                continue
            text = str(PythonPrinter().doprint(expression))
            check = CountCheck(text, [*map(str, symbols)], self._lines[symbols[-1]])
            self._checked.add(expression)
            self._builder.call(check, *map(self._find_count, symbols))

    def _resolve_size(self, size: Any) -> Any:
        """Return the node of a size that depends on counts, or the argument itself.

        It follows from the counts as they were traced: what they are compared with must not replace them.
        """
        if not list_traced_counts(size):
            return size
        return self._compute(size.node._expr, size.node.shape_env)

    def _compute(self, expression: sympy.Expr, environment: Any) -> Any:
        """Return the node of an expression, or its number."""
        if expression.is_number:
            return int(expression)
        if expression.is_Symbol and environment.is_unbacked_symint(expression):
            return self._find_count(expression)
        if expression not in self._sizes:
            symbols = sorted(expression.free_symbols, key=str)
            arguments = [
                self._find_count(item)
                if environment.is_unbacked_symint(item)
                else environment.create_symintnode(item, hint=int(environment.backed_var_to_val[item]))
                for item in symbols
            ]
            text = str(PythonPrinter().doprint(expression))
            self._sizes[expression] = self._builder.call(SizeFromCounts(text, [*map(str, symbols)]), *arguments)
        return self._sizes[expression]

    def _find_count(self, symbol: sympy.Symbol) -> fx.Node:
        """Return the node of a count; exchange numbers if it is that of other ranks."""
        if symbol not in self._counts:
            division = self._divisions[symbol]
            own = self._find_own(division)
            assert own is not None, symbol
            if own not in self._counts:
                self._count_in_mask(division)
            if symbol != own:
                total = self._exchange(division)
                self._counts.setdefault(symbol, total)
        return self._counts[symbol]

    def _count_in_mask(self, division: Sharding) -> None:
        """Count the rows that a mask selects on this rank, if no value has their number."""
        masks = [find_selection(placement) for placement in division]
        sharding = tuple(Replicate() if item is None else Shard(item.dim, item.lengths) for item in masks)
        own = self._find_own(division)
        assert own is not None
        found = self._builder.redistribute(find_mask(division), sharding, "number of selected rows")
        self._counts[own] = self._builder.call(local_kernels.count_places, found)

    def _find_own(self, division: Sharding) -> sympy.Symbol | None:
        """Return the count of this rank's rows; None if they are not divided, or do not lie as they were selected."""
        known = [
            (find_selection(item), rank)
            for item, rank in zip(division, self._builder.ranks, strict=True)
            if not isinstance(item, Replicate)
        ]
        if not known or any(selection is None for selection, _ in known):
            return None
        selection, rank = known[-1]
        assert selection is not None
        return require_count(selection.counts[rank])

    def _exchange(self, division: Sharding) -> fx.Node:
        """Exchange the numbers of all ranks that share rows; return the number of all rows."""
        total: fx.Node | None = None
        for number in reversed(range(len(division))):
            selection = find_selection(division[number])
            if selection is None:
                continue
            symbols = [require_count(item) for item in selection.counts]
            own = symbols[self._builder.ranks[number]]
            if total is not None:
                self._counts.setdefault(own, total)
            key = sympy.Add(*symbols)
            if key not in self._sizes:
                gathered = self._gather(self._counts[own], number)
                for place, symbol in enumerate(symbols):
                    found = self._builder.call(getitem, gathered, place)
                    self._counts.setdefault(symbol, found)
                self._sizes[key] = self._builder.call(sum, gathered)
            total = self._sizes[key]
        assert total is not None
        return total

    def _gather(self, count: fx.Node | int, number: int) -> fx.Node:
        """Add the exchange of a count between the ranks along an axis; return the list of all."""
        found = self._builder.call(torch.tensor, count, device=self._builder.device)
        found.meta["described"] = "number of selected rows"
        gathered = self._builder.all_gather(found, "numbers of selected rows", torch.int64.itemsize, number)
        return self._builder.call(torch.Tensor.tolist, gathered)

    def take_part(self, whole: fx.Node, sharding: Sharding, number: int) -> fx.Node:
        """Return this rank's part, along an axis, of a value that is whole along it.

        Args:
            whole: The value.
            sharding: The sharding of the part.
            number: The number of the axis.
        """
        placement, rank = sharding[number], self._builder.ranks[number]
        assert isinstance(placement, Shard)
        if is_reordered([placement]):
            owners = self._find_owners(sharding, number)
            return self._builder.call(local_kernels.take_own_rows, whole, placement.dim, owners, rank)
        start, length = self.find_start(placement, rank), placement.lengths[rank]
        return self._builder.call(local_kernels.slice_dim, whole, placement.dim, start, length)

    def restore_order(self, gathered: fx.Node, sharding: Sharding, number: int) -> fx.Node:
        """Return gathered parts in the order of one device.

        Args:
            gathered: The parts of the ranks along an axis, one after the other.
            sharding: The sharding from which they were gathered.
            number: The number of the axis.
        """
        placement = sharding[number]
        if not is_reordered([placement]):
            return gathered
        dim, owners = selection_dim(placement), self._find_owners(sharding, number)
        return self._builder.call(local_kernels.restore_order, gathered, dim, owners)

    def _find_owners(self, sharding: Sharding, number: int) -> fx.Node:
        """Return the rank along an axis from which each selected row is, in the order of one device.

        Args:
            sharding: How selected rows are divided.
            number: The number of the axis, which divides another dim of the mask than the first.
        """
        selection = find_selection(sharding[number])
        assert selection is not None
        outer = [find_selection(item) for item in sharding[:number]]
        known = [
            Shard(item.dim, item.lengths) if item is not None and item.mask is selection.mask else Replicate()
            for item in outer
        ]
        whole: Sharding = (*known, *[Replicate()] * (len(sharding) - number))
        mask = self._builder.redistribute(selection.mask, whole, "order of selected rows")
        return self._builder.call(local_kernels.find_owners, mask, selection.dim, selection.lengths)


def find_mask(division: Sharding) -> fx.Node:
    """Return the mask that selects rows which axes divide."""
    return next(item.mask for item in map(find_selection, division) if item is not None)


def keep_dim(sharding: Sharding, dim: int) -> Sharding:
    """Return a sharding without what divides other dims."""
    return tuple(item if is_divided_along(item, dim) else Replicate() for item in sharding)


def selection_dim(placement: Placement) -> int:
    """Return the dim in which a value has selected rows."""
    assert isinstance(placement, Shard)
    return placement.dim


def is_divided(sharding: Sharding) -> bool:
    """Return whether an axis divides a value."""
    return not all(isinstance(item, Replicate) for item in sharding)


def require_count(size: Any) -> sympy.Symbol:
    """Return the symbol of a count."""
    found = find_traced_count(size)
    assert found is not None, size
    return found

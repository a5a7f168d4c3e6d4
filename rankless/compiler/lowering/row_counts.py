"""Counts of selected rows in a local program: values that it computes while it runs.

See Note [counts of selected rows]. A count is taken from the first value that has it as a size. A size that depends on
counts then is a value that follows from them. Where a later value must have an equal count, the program compares them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.printers import PythonPrinter

from rankless.compiler.ir.logical_program import LogicalValue
from rankless.compiler.tracing.row_counts import find_traced_count, list_traced_counts
from rankless.compiler.tracing.symbolic_sizes import EXPRESSION_GLOBALS
from rankless.errors import CaptureError

aten = torch.ops.aten

AddCall = Callable[..., fx.Node]
"""Adds a call of a function to the local graph."""


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
    """Called with two counts of selected rows that the job combines, raises `CaptureError` if they differ.

    Args:
        line: The script's line.
    """

    __name__ = "count_check"

    def __init__(self, line: str) -> None:
        self._line = line

    def __call__(self, found: int, expected: int) -> None:
        """Compare two counts."""
        if found != expected:
            raise CaptureError(
                expected=f"as many selected rows as in the values that they are combined with: {expected}",
                found=found,
                fix="select both with the same mask",
                where=self._line or None,
            )


class RowCounts:
    """The counts that a local graph has computed so far.

    Args:
        add_call: Adds a call to the graph.
    """

    def __init__(self, add_call: AddCall) -> None:
        self._add_call = add_call
        self._counts: dict[sympy.Symbol, fx.Node] = {}
        self._sizes: dict[sympy.Expr, fx.Node] = {}
        self._equal: list[tuple[torch.SymInt, str]] = []

    def define(self, value: Any, local: fx.Node, line: str) -> None:
        """Take the counts that a value is the first to have from a local value, which is whole.

        Args:
            value: The `LogicalValue`.
            local: The local value.
            line: The script's line.
        """
        for dim, size in enumerate(value.shape if isinstance(value, LogicalValue) else ()):
            symbol = find_traced_count(size)
            if symbol is None or symbol in self._counts:
                continue
            self._counts[symbol] = self._add_call(aten.sym_size.int, local, dim)
            if size.node.expr != symbol and symbol not in size.node.shape_env.counts_read:
                self._equal.append((size, line))

    def resolve(self, argument: Any) -> Any:
        """Return a call's argument with a node for each size that depends on counts."""
        return fx.node.map_aggregate(argument, self._resolve_size)

    def add_checks(self) -> None:
        """Compare what the trace has taken for equal. Operators that need it have failed before this, or broadcast."""
        for size, line in self._equal:
            expected = size.node.expr
            counts = [item for item in expected.free_symbols if size.node.shape_env.is_unbacked_symint(item)]
            if all(item in self._counts for item in counts):
                found = self._counts[size.node._expr]
                self._add_call(CountCheck(line), found, self._compute(expected, size.node.shape_env))

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
        if expression in self._counts:
            return self._counts[expression]
        if expression not in self._sizes:
            symbols = sorted(expression.free_symbols, key=str)
            arguments = [
                self._counts[item]
                if environment.is_unbacked_symint(item)
                else environment.create_symintnode(item, hint=int(environment.backed_var_to_val[item]))
                for item in symbols
            ]
            text = str(PythonPrinter().doprint(expression))
            self._sizes[expression] = self._add_call(SizeFromCounts(text, [*map(str, symbols)]), *arguments)
        return self._sizes[expression]

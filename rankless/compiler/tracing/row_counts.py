"""Counts of rows that values select, as `x[mask]` does: sizes that are known only while the program runs.

Note [counts of selected rows]: such a count is a symbol of PyTorch's `ShapeEnv` without a number, "unbacked". The
program takes it from the value that has it (`lowering.row_counts`). If the job's Python asks for it, or compares it,
the answer is a value that Python reads; see Note [values that Python reads]. After the trace nothing may ask for the
number. Two counts are equal only if they are the same expression, so a rule that needs equal sizes does not apply.
Costs assume a share of the rows that there can be. See docs/decisions/0043-rows-selected-by-values.md.
"""

from collections.abc import Iterable
from typing import Any

import sympy  # type: ignore[import-untyped]  # it has no stubs
from torch import SymBool, SymFloat, SymInt

from rankless.errors import CaptureError

ASSUMED_COUNT = 1024
"""How many rows costs assume, if a count has no known limit."""

SELECTED_SHARE = 4
"""Costs assume that one of so many rows is selected: what selects all moves no less than the whole."""

READ_BY_JOB = "read by the job"
"""The reason of what a trace assumes of counts because the job's Python has read it."""


def list_counts(value: Any) -> list[sympy.Symbol]:
    """Return the counts of selected rows in a size, in a fixed order."""
    if not isinstance(value, SymInt | SymFloat | SymBool):
        return []
    environment = value.node.shape_env
    return sorted(filter(environment.is_unbacked_symint, value.node.expr.free_symbols), key=str)


def list_traced_counts(value: Any) -> list[sympy.Symbol]:
    """Return the counts in a size as it was traced, though it may have turned out to equal another size."""
    if not isinstance(value, SymInt | SymFloat | SymBool):
        return []
    return sorted(filter(value.node.shape_env.is_unbacked_symint, value.node._expr.free_symbols), key=str)


def find_traced_count(value: Any) -> sympy.Symbol | None:
    """Return the count that a size is, as it was traced; None if it is no count."""
    counts = list_traced_counts(value)
    return counts[0] if counts and value.node._expr == counts[0] else None


def has_count(values: Iterable[Any]) -> bool:
    """Return whether a size depends on a count of selected rows."""
    return any(map(list_counts, values))


def assume_count(value: Any) -> Any:
    """Return the number that costs assume for a size that depends on counts."""
    return evaluate_with_assumed_counts(value.node, SELECTED_SHARE)


def evaluate_with_assumed_counts(node: Any, share: int = 1) -> Any:
    """Return what an expression of a trace gives for assumed counts.

    Args:
        node: PyTorch's `SymNode`.
        share: Assume that one of so many of the rows that could be selected is.
    """
    environment = node.shape_env
    numbers: dict[sympy.Symbol, Any] = {}
    for symbol in node.expr.free_symbols:
        if not environment.is_unbacked_symint(symbol):
            numbers[symbol] = environment.backed_var_to_val[symbol]
            continue
        numbers[symbol] = max(1, limit_count(environment, symbol) // share)
    found = sympy.sympify(node.expr.xreplace({key: sympy.sympify(item) for key, item in numbers.items()}))
    if isinstance(found, sympy.logic.boolalg.BooleanAtom):
        return bool(found)
    return int(found) if found.is_integer else float(found)


def limit_count(environment: Any, symbol: sympy.Symbol) -> int:
    """Return the largest number that a count can be, or that costs assume if there is no limit."""
    limit = environment.var_to_range[symbol].upper
    return int(limit) if limit.is_number and limit.is_finite and limit < 2**48 else ASSUMED_COUNT


def decide_without_count(node: Any) -> Any:
    """Answer a question about counts after the trace; see Note [counts of selected rows].

    Args:
        node: PyTorch's `SymNode` of the question.

    Raises:
        CaptureError: The question is what the number is.
    """
    expression = node.expr
    if isinstance(expression, sympy.Eq | sympy.Ne):
        return isinstance(expression, sympy.Ne)
    if isinstance(expression, sympy.core.relational.Relational):
        return evaluate_with_assumed_counts(node)
    raise CaptureError(
        expected="a program that does not need the number of selected rows before it runs",
        found=f"{expression} of them, where a number is needed",
        fix="select rows in the job by torch.where(mask, values, other) instead of values[mask]",
    )

"""Symbolic sizes: one program captured, sharded and lowered for sizes that vary from call to call.

Note [symbolic sizes]: a varying size is PyTorch's `SymInt`. It behaves as the number of the present call. Every
decision that depends on it (an operator's fake kernel, a rule, an equality of shard lengths) becomes a guard in its
`ShapeEnv`. Where it must become a plain number (`range`, `len`, an index), the guard requires exactly that number. A
program is therefore correct wherever its guards hold. Only the choice between strategies that are all correct uses the
number without a guard (`size_hint`). See docs/decisions/0006-variable-shapes.md.

A count of rows that values select, as by `x[mask]`, is a symbol without a number, "unbacked" in PyTorch's words: see
`compiler.selected_rows`. If the job's Python asks for it, or compares it, the answer is a value that Python reads; see
Note [values that Python reads]. After the trace nothing may ask for the number. Two counts are equal only if they are
the same expression, so a rule that needs equal sizes does not apply. Costs assume a share of the rows there can be.
"""

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]  # it has no stubs
import torch
from torch import SymBool, SymFloat, SymInt
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, GuardOnDataDependentSymNode, ShapeEnv
from torch.utils._sympy.printers import PythonPrinter

from rankless.compiler.tracing.replaced_attributes import replace_attributes
from rankless.errors import CaptureError
from rankless.user_code import is_user_code, user_line

MIN_SYMBOLIC_SIZE = 2
"""PyTorch treats sizes of 0 and 1 specially (empty, broadcast), so those never become symbols."""

EXPRESSION_GLOBALS = {"math": math, "torch": torch}
"""Names that the text of an expression may use besides sizes."""

ASSUMED_COUNT = 1024
"""How many rows costs assume, if a count has no known limit."""

SELECTED_SHARE = 4
"""Costs assume that one of so many rows is selected: what selects all moves no less than the whole."""

READ_BY_JOB = "read by the job"
"""The reason of what a trace assumes of counts because the job's Python has read it."""


class LineTrackingShapeEnv(ShapeEnv):
    """PyTorch's `ShapeEnv` of symbols and guards, which also records the user's lines that specialize a size.

    `read_count` answers where a decision of a trace depends on a count of selected rows. After the trace, `is_traced`,
    nothing may ask for one. `selections` has those of divided rows, see `selected_rows.selections`.
    """

    def __init__(self) -> None:
        self.read_count: Callable[[Any], Any] | None = None
        self.is_traced = False
        self.selections: Any = None
        self.counts_made: list[Any] = []
        super().__init__(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=True, duck_shape=False)
        self.specializing_lines: list[str] = []

    def _set_replacement(self, a: Any, tgt: Any, msg: str) -> None:
        if tgt.is_number:
            self.specializing_lines.append(user_line(sys._getframe(1)))
        super()._set_replacement(a, tgt, msg)

    def create_unbacked_symint(self, *args: Any, **kwargs: Any) -> SymInt:
        """Create a count of selected rows, and note it."""
        count: SymInt = super().create_unbacked_symint(*args, **kwargs)
        self.counts_made.append(count.node.expr)
        return count

    def evaluate_sym_node(self, sym_node: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate an expression; what depends on a count of selected rows is asked of `read_count`."""
        if self.is_traced and any(map(self.is_unbacked_symint, sym_node.expr.free_symbols)):
            return sympy.sympify(decide_without_count(sym_node))  # PyTorch's refusal would take milliseconds
        try:
            return super().evaluate_sym_node(sym_node, *args, **kwargs)
        except GuardOnDataDependentSymNode:
            if self.read_count is None:
                raise
            return sympy.sympify(self.read_count(sym_node))


@dataclass(frozen=True)
class SymbolicSizes:
    """The varying sizes of one capture, as symbols by name."""

    shape_env: LineTrackingShapeEnv = field(default_factory=LineTrackingShapeEnv)
    symbols: dict[str, SymInt] = field(default_factory=dict)

    def create(self, number: int, name: str) -> Any:
        """Create a symbolic size that is `number` in the present call."""
        source = ConstantSource(name)
        symbol = self.shape_env.create_symbol(number, source=source, dynamic_dim=DimDynamic.DYNAMIC)
        size = self.shape_env.create_symintnode(symbol, hint=number, source=source)
        assert isinstance(size, SymInt), f"{name} = {number} is no symbol"
        self.symbols[str(symbol)] = size
        return size

    def guard_expressions(self) -> list[str]:
        """Return the conditions under which the program is correct, as expressions in the symbols' names."""
        found = self.shape_env.produce_guards_expression(list(self.symbols.values()))
        return [] if found is None else [found]

    def has_free_symbols(self) -> bool:
        """Return whether any size is still free; none is if the job used the number of each."""
        return any(not size.node.expr.is_number for size in self.symbols.values())


@contextlib.contextmanager
def specialize_on_repr() -> Iterator[None]:
    """Within the context, a size that the user's code converts to text becomes the number it is now, with a guard."""
    kinds: tuple[tuple[Any, type], ...] = ((SymInt, int), (SymFloat, float), (SymBool, bool))
    functions = [(kind, "__repr__", make_specializing_repr(kind.__repr__, plain)) for kind, plain in kinds]
    with replace_attributes(*functions):
        yield


def make_specializing_repr(original: Callable[[Any], str], plain: type) -> Callable[[Any], str]:
    """Return a `__repr__` for sizes that gives the name, or to the user's code the number.

    The number specializes the program.
    """

    def specializing_repr(size: Any) -> str:
        return repr(plain(size)) if is_user_code(sys._getframe(1).f_code.co_filename) else original(size)

    return specializing_repr


def compile_guards(texts: Sequence[str], count: int) -> Callable[[Sequence[int]], bool]:
    """Compile all conditions on `count` sizes into one check."""
    text = " and ".join(f"({item})" for item in dict.fromkeys(texts)) or "True"
    code = compile(text, "<rankless sizes>", "eval")
    names = [f"t{position}" for position in range(count)]

    def holds(sizes: Sequence[int]) -> bool:
        return bool(eval(code, dict(EXPRESSION_GLOBALS), {"L": dict(zip(names, sizes, strict=True))}))

    return holds


def is_symbolic(value: Any) -> bool:
    """Return whether a value is made of varying sizes."""
    return isinstance(value, SymInt | SymFloat | SymBool)


def is_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether sizes are the same expressions, without a guard: others may be equal in the present call."""
    return list(map(str, one)) == list(map(str, other))


def size_hint(value: Any) -> Any:
    """Return the number of a size in the present call without a guard, for choices where either way is correct."""
    if not is_symbolic(value):
        return value
    if value.node.hint is not None:
        return value.node.hint
    return evaluate_with_assumed_counts(value.node, SELECTED_SHARE)


def format_expression(size: SymInt | SymFloat) -> str:
    """Return an expression in the names of symbols, as code."""
    return str(PythonPrinter().doprint(size.node.expr))


def evaluate_size(values: Any, symbols: Mapping[str, int]) -> Any:
    """Evaluate a size for other values of the symbols."""
    return eval(format_expression(values), dict(EXPRESSION_GLOBALS), dict(symbols)) if is_symbolic(values) else values


def list_traced_counts(value: Any) -> list[sympy.Symbol]:
    """Return the counts of selected rows in a size as it was traced, though it may have turned out to equal another.

    They are in a fixed order.
    """
    if not is_symbolic(value):
        return []
    return sorted(filter(value.node.shape_env.is_unbacked_symint, value.node._expr.free_symbols), key=str)


def find_traced_count(value: Any) -> sympy.Symbol | None:
    """Return the count that a size is, as it was traced; None if it is no count."""
    counts = list_traced_counts(value)
    return counts[0] if counts and value.node._expr == counts[0] else None


def has_count(values: Iterable[Any]) -> bool:
    """Return whether a size depends on a count of selected rows."""
    return any(
        value.node.shape_env.is_unbacked_symint(symbol)
        for value in values
        if is_symbolic(value)
        for symbol in value.node.expr.free_symbols
    )


def evaluate_with_assumed_counts(node: Any, share: int = 1) -> Any:
    """Return what an expression of a trace gives for assumed counts.

    Args:
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

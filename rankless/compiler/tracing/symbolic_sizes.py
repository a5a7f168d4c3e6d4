"""Symbolic sizes: one program captured, sharded and lowered for sizes that vary from call to call.

Note [symbolic sizes]: a varying size is PyTorch's `SymInt`. It behaves as the number of the present call. Every
decision that depends on it (an operator's fake kernel, a rule, an equality of shard lengths) becomes a guard in its
`ShapeEnv`. Where it must become a plain number (`range`, `len`, an index), the guard requires exactly that number. A
program is therefore correct wherever its guards hold. Only the choice between strategies that are all correct uses the
number without a guard (`size_hint`). See docs/decisions/0006-variable-shapes.md.
"""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from sympy import sympify  # type: ignore[import-untyped]  # it has no stubs
from torch import SymBool, SymFloat, SymInt
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, GuardOnDataDependentSymNode, ShapeEnv
from torch.utils._sympy.printers import PythonPrinter

from rankless.compiler.tracing.row_counts import assume_count, decide_without_count
from rankless.user_code import is_user_code, user_line

MIN_SYMBOLIC_SIZE = 2
"""PyTorch treats sizes of 0 and 1 specially (empty, broadcast), so those never become symbols."""

EXPRESSION_GLOBALS = {"math": math, "torch": torch}
"""Names that the text of an expression may use besides sizes."""


class LineTrackingShapeEnv(ShapeEnv):
    """PyTorch's `ShapeEnv` of symbols and guards, which also records the user's lines that specialize a size.

    `read_count` answers where a decision of a trace depends on a count of selected rows, see `row_counts`. After the
    trace, `is_traced`, nothing may ask for one. `selections` has those of divided rows, see `row_selections`.
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
            return sympify(decide_without_count(sym_node))  # PyTorch's refusal would take milliseconds
        try:
            return super().evaluate_sym_node(sym_node, *args, **kwargs)
        except GuardOnDataDependentSymNode:
            if self.read_count is None:
                raise
            return sympify(self.read_count(sym_node))


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
        return any(not is_static(size) for size in self.symbols.values())


@contextlib.contextmanager
def specialize_on_repr() -> Iterator[None]:
    """Within the context, a size that the user's code converts to text becomes the number it is now, with a guard."""
    kinds: tuple[tuple[Any, type], ...] = ((SymInt, int), (SymFloat, float), (SymBool, bool))
    originals = [kind.__repr__ for kind, _ in kinds]
    for (kind, plain), original in zip(kinds, originals, strict=True):
        kind.__repr__ = make_specializing_repr(original, plain)
    try:
        yield
    finally:
        for (kind, _), original in zip(kinds, originals, strict=True):
            kind.__repr__ = original


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


def is_static(value: Any) -> bool:
    """Return whether a value made of sizes is the same in every call, because its guards allow no other."""
    return not is_symbolic(value) or bool(value.node.expr.is_number)


def is_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether sizes are the same expressions, without a guard: others may be equal in the present call."""
    return list(map(str, one)) == list(map(str, other))


def size_hint(value: Any) -> Any:
    """Return the number of a size in the present call without a guard, for choices where either way is correct."""
    if not is_symbolic(value):
        return value
    return value.node.hint if value.node.hint is not None else assume_count(value)


def format_expression(size: SymInt | SymFloat) -> str:
    """Return an expression in the names of symbols, as code."""
    return str(PythonPrinter().doprint(size.node.expr))


def evaluate_size(values: Any, symbols: Mapping[str, int]) -> Any:
    """Evaluate a size for other values of the symbols."""
    return eval(format_expression(values), dict(EXPRESSION_GLOBALS), dict(symbols)) if is_symbolic(values) else values

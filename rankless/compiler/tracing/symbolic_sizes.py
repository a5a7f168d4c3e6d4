"""Sizes that vary from call to call, as symbols that one program is captured, placed and lowered for.

Note [sizes that vary]: a varying size is PyTorch's `SymInt`. It behaves as the number that it is in the present call,
and whatever is decided by it (an operator's fake kernel, a rule, an equality of shard lengths) is written down as a
guard in the `ShapeEnv` it belongs to. Where it would become a plain number (`range`, `len`, an index) the guard says
that it must be that number. So a program is right wherever its guards hold, by construction; only the choice between
strategies that are all right looks at the number alone (`known`). docs/decisions/0006-variable-shapes.md.
"""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.printers import PythonPrinter

from rankless.user_code import is_user_code, user_line

MIN_SYMBOLIC_SIZE = 2
"""PyTorch gives sizes of 0 and 1 a meaning of their own (empty, broadcast), so those are never symbols."""

EXPRESSION_GLOBALS = {"math": math, "torch": torch}
"""What the text of an expression may name besides sizes."""


class LineTrackingShapeEnv(ShapeEnv):
    """PyTorch's book of symbols and guards, which also keeps the user's lines that fix a size."""

    def __init__(self) -> None:
        super().__init__(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False, duck_shape=False)
        self.specializing_lines: list[str] = []

    def _set_replacement(self, a: Any, tgt: Any, msg: str) -> None:
        if tgt.is_number:
            self.specializing_lines.append(user_line(sys._getframe(1)))
        super()._set_replacement(a, tgt, msg)


@dataclass(frozen=True)
class SymbolicSizes:
    """The varying sizes of one capture: their numbers now, and the symbols for them, by name."""

    shape_env: LineTrackingShapeEnv = field(default_factory=LineTrackingShapeEnv)
    symbols: dict[str, SymInt] = field(default_factory=dict)

    def create(self, number: int, name: str) -> Any:
        """A new varying size, `number` in the present call."""
        source = ConstantSource(name)
        symbol = self.shape_env.create_symbol(number, source=source, dynamic_dim=DimDynamic.DYNAMIC)
        size = self.shape_env.create_symintnode(symbol, hint=number, source=source)
        assert isinstance(size, SymInt), f"{name} = {number} is no symbol"
        self.symbols[str(symbol)] = size
        return size

    def guard_expressions(self) -> list[str]:
        """What must hold of the sizes for the program to be right: expressions in the names of the symbols."""
        found = self.shape_env.produce_guards_expression(list(self.symbols.values()))
        return [] if found is None else [found]

    def has_free_symbols(self) -> bool:
        """Whether any size is still free: none is, if the job has asked for the number of each."""
        return any(not is_static(size) for size in self.symbols.values())


@contextlib.contextmanager
def specialize_on_repr() -> Iterator[None]:
    """Within, a size that the user's code turns into text is the number that it then must be."""
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
    """How a size is written: by name, but for the user's code as a number, which is then part of the program."""

    def specializing_repr(size: Any) -> str:
        return repr(plain(size)) if is_user_code(sys._getframe(1).f_code.co_filename) else original(size)

    return specializing_repr


def compile_guards(texts: Sequence[str], count: int) -> Callable[[Sequence[int]], bool]:
    """One check of all conditions on `count` sizes."""
    text = " and ".join(f"({item})" for item in dict.fromkeys(texts)) or "True"
    code = compile(text, "<rankless sizes>", "eval")
    names = [f"t{place}" for place in range(count)]

    def holds(sizes: Sequence[int]) -> bool:
        return bool(eval(code, dict(EXPRESSION_GLOBALS), {"L": dict(zip(names, sizes, strict=True))}))

    return holds


def is_symbolic(value: Any) -> bool:
    """Whether a value is made of varying sizes."""
    return isinstance(value, SymInt | SymFloat | SymBool)


def is_static(value: Any) -> bool:
    """Whether a value made of sizes is the same in every call, because its guards leave no other."""
    return not is_symbolic(value) or bool(value.node.expr.is_number)


def size_hint(value: Any) -> Any:
    """The number that a size is in the present call, for choices in which either way is right; it sets no guard."""
    return value.node.hint if is_symbolic(value) else value


def format_expression(size: SymInt | SymFloat) -> str:
    """An expression in the names of symbols, as code."""
    return str(PythonPrinter().doprint(size.node.expr))


def evaluate_size(values: Any, symbols: Mapping[str, int]) -> Any:
    """The number that a size is for other values of the symbols."""
    return eval(format_expression(values), dict(EXPRESSION_GLOBALS), dict(symbols)) if is_symbolic(values) else values

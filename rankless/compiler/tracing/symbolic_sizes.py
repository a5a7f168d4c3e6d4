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

SMALLEST = 2
"""PyTorch gives sizes of 0 and 1 a meaning of their own (empty, broadcast), so those are never symbols."""

NUMBERS = {"math": math, "torch": torch}
"""What the text of an expression may name besides sizes."""


class Environment(ShapeEnv):
    """PyTorch's book of symbols and guards, which also keeps the user's lines that fix a size."""

    def __init__(self) -> None:
        super().__init__(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False, duck_shape=False)
        self.fixing_lines: list[str] = []

    def _set_replacement(self, a: Any, tgt: Any, msg: str) -> None:
        if tgt.is_number:
            self.fixing_lines.append(user_line(sys._getframe(1)))
        super()._set_replacement(a, tgt, msg)


@dataclass(frozen=True)
class Sizes:
    """The varying sizes of one capture: their numbers now, and the symbols for them, by name."""

    environment: Environment = field(default_factory=Environment)
    symbols: dict[str, SymInt] = field(default_factory=dict)

    def size(self, number: int, name: str) -> Any:
        """A new varying size, `number` in the present call."""
        source = ConstantSource(name)
        symbol = self.environment.create_symbol(number, source=source, dynamic_dim=DimDynamic.DYNAMIC)
        size = self.environment.create_symintnode(symbol, hint=number, source=source)
        assert isinstance(size, SymInt), f"{name} = {number} is no symbol"
        self.symbols[str(symbol)] = size
        return size

    def conditions(self) -> list[str]:
        """What must hold of the sizes for the program to be right: expressions in the names of the symbols."""
        found = self.environment.produce_guards_expression(list(self.symbols.values()))
        return [] if found is None else [found]

    def vary(self) -> bool:
        """Whether any size is still free: none is, if the job has asked for the number of each."""
        return any(not is_number(size) for size in self.symbols.values())


@contextlib.contextmanager
def sizes_spelled_out() -> Iterator[None]:
    """Within, a size that the user's code turns into text is the number that it then must be."""
    kinds: tuple[tuple[Any, type], ...] = ((SymInt, int), (SymFloat, float), (SymBool, bool))
    originals = [kind.__repr__ for kind, _ in kinds]
    for (kind, plain), original in zip(kinds, originals, strict=True):
        kind.__repr__ = spelling(original, plain)
    try:
        yield
    finally:
        for (kind, _), original in zip(kinds, originals, strict=True):
            kind.__repr__ = original


def spelling(original: Callable[[Any], str], plain: type) -> Callable[[Any], str]:
    """How a size is written: by name, but for the user's code as a number, which is then part of the program."""

    def spelled(size: Any) -> str:
        return repr(plain(size)) if is_user_code(sys._getframe(1).f_code.co_filename) else original(size)

    return spelled


def condition_of(texts: Sequence[str], count: int) -> Callable[[Sequence[int]], bool]:
    """One check of all conditions on `count` sizes."""
    text = " and ".join(f"({item})" for item in dict.fromkeys(texts)) or "True"
    code = compile(text, "<rankless sizes>", "eval")
    names = [f"t{place}" for place in range(count)]

    def holds(sizes: Sequence[int]) -> bool:
        return bool(eval(code, dict(NUMBERS), {"L": dict(zip(names, sizes, strict=True))}))

    return holds


def is_size(value: Any) -> bool:
    """Whether a value is made of varying sizes."""
    return isinstance(value, SymInt | SymFloat | SymBool)


def is_number(value: Any) -> bool:
    """Whether a value made of sizes is the same in every call, because its guards leave no other."""
    return not is_size(value) or bool(value.node.expr.is_number)


def known(value: Any) -> Any:
    """The number that a size is in the present call, for choices in which either way is right; it sets no guard."""
    return value.node.hint if is_size(value) else value


def text_of(size: SymInt | SymFloat) -> str:
    """An expression in the names of symbols, as code."""
    return str(PythonPrinter().doprint(size.node.expr))


def numbers_of(values: Any, symbols: Mapping[str, int]) -> Any:
    """The number that a size is for other values of the symbols."""
    return eval(text_of(values), dict(NUMBERS), dict(symbols)) if is_size(values) else values

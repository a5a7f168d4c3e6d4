"""What a function's code reads by name, as its bytecode says."""

import dis
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

ASKING = frozenset(
    {"getattr", "vars", "__dict__", "__getattribute__", "attrgetter", "methodcaller", "asdict", "astuple", "fields"}
    | {"copy", "deepcopy"}
)
"""Code with one of these names reads attributes that it does not name."""

GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"})


@dataclass(frozen=True, eq=False)
class Names:
    """The names that a function reads, nested functions' included; `every`: it may read any attribute."""

    read: frozenset[str]
    every: bool = False
    read_globally: frozenset[str] = frozenset()
    imported: frozenset[str] = frozenset()
    """Modules imported inside the function."""

    @functools.cached_property
    def named(self) -> "Names":
        """Without the attributes that code may read but does not name."""
        return Names(self.read, read_globally=self.read_globally, imported=self.imported) if self.every else self

    def among(self, scope: Any) -> list[str]:
        """Those that stand in a namespace, in an order that is the same in every process."""
        if self.every:
            return sorted(name for name in scope if isinstance(name, str) and not name.startswith("__"))
        return sorted(self.read & scope.keys())


NOTHING = Names(frozenset())


class Reader:
    """Reads code, each once."""

    def __init__(self) -> None:
        self._known: dict[CodeType, Names] = {}

    def names(self, code: CodeType) -> Names:
        """What this code reads."""
        if code not in self._known:
            read = names_in(code)
            found = list(instructions(code))
            of_globals = frozenset(item.argval for item in found if item.opname in GLOBAL)
            self._known[code] = Names(
                read,
                every=bool(read & ASKING),
                read_globally=read if "globals" in read else of_globals,
                imported=frozenset(item.argval for item in found if item.opname == "IMPORT_NAME"),
            )
        return self._known[code]

    def modules(self, code: CodeType, scope: dict[str, Any]) -> list[tuple[str, ModuleType]]:
        """The modules that code imports when it runs."""
        package = scope.get("__package__") or ""
        found = []
        for name in sorted(self.names(code).imported):
            module = sys.modules.get(name) or sys.modules.get(f"{package}.{name}")
            if module is not None:
                found.append((name, module))
        return found


def instructions(code: CodeType) -> Iterator[dis.Instruction]:
    """The instructions of a function and of those nested in it."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from instructions(constant)


def names_in(code: CodeType) -> frozenset[str]:
    """The names in a function's code; words in its text count too: `getattr(settings, "scale")`."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= names_in(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            names.add(constant)
    return frozenset(names)


def functions_in(value: Any) -> list[FunctionType]:
    """The Python functions that a method, property or decorated function stands for."""
    if isinstance(value, FunctionType):
        return [value]
    if isinstance(value, property):
        inner = [value.fget]
    else:
        inner = [getattr(value, "__func__", None), getattr(value, "__wrapped__", None)]
    return [function for item in inner if item is not None for function in functions_in(item)]

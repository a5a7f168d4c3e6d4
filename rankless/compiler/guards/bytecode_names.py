"""What a function's code reads by name, as its bytecode says."""

import dis
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

DYNAMIC_ACCESS_NAMES = frozenset(
    {"getattr", "vars", "__dict__", "__getattribute__", "attrgetter", "methodcaller", "asdict", "astuple", "fields"}
    | {"copy", "deepcopy"}
)
"""Code with one of these names reads attributes that it does not name."""

GLOBAL_OPCODES = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"})


@dataclass(frozen=True, eq=False)
class ReadNames:
    """The names that a function reads, nested functions' included; `every`: it may read any attribute."""

    names: frozenset[str]
    includes_all: bool = False
    global_names: frozenset[str] = frozenset()
    imported_modules: frozenset[str] = frozenset()
    """Modules imported inside the function."""

    @functools.cached_property
    def explicit(self) -> "ReadNames":
        """Without the attributes that code may read but does not name."""
        return (
            ReadNames(self.names, global_names=self.global_names, imported_modules=self.imported_modules)
            if self.includes_all
            else self
        )

    def select(self, namespace: Any) -> list[str]:
        """Those that stand in a namespace, in an order that is the same in every process."""
        if self.includes_all:
            return sorted(name for name in namespace if isinstance(name, str) and not name.startswith("__"))
        return sorted(self.names & namespace.keys())


NO_NAMES = ReadNames(frozenset())


class BytecodeReader:
    """Reads code, each once."""

    def __init__(self) -> None:
        self._cache: dict[CodeType, ReadNames] = {}

    def read_names(self, code: CodeType) -> ReadNames:
        """What this code reads."""
        if code not in self._cache:
            names = extract_names(code)
            instructions = list(iterate_instructions(code))
            of_globals = frozenset(item.argval for item in instructions if item.opname in GLOBAL_OPCODES)
            self._cache[code] = ReadNames(
                names,
                includes_all=bool(names & DYNAMIC_ACCESS_NAMES),
                global_names=names if "globals" in names else of_globals,
                imported_modules=frozenset(item.argval for item in instructions if item.opname == "IMPORT_NAME"),
            )
        return self._cache[code]

    def imported_modules(self, code: CodeType, scope: dict[str, Any]) -> list[tuple[str, ModuleType]]:
        """The modules that code imports when it runs."""
        package = scope.get("__package__") or ""
        found = []
        for name in sorted(self.read_names(code).imported_modules):
            module = sys.modules.get(name) or sys.modules.get(f"{package}.{name}")
            if module is not None:
                found.append((name, module))
        return found


def iterate_instructions(code: CodeType) -> Iterator[dis.Instruction]:
    """The instructions of a function and of those nested in it."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from iterate_instructions(constant)


def extract_names(code: CodeType) -> frozenset[str]:
    """The names in a function's code; words in its text count too: `getattr(settings, "scale")`."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= extract_names(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            names.add(constant)
    return frozenset(names)


def unwrap_functions(value: Any) -> list[FunctionType]:
    """The Python functions that a method, property or decorated function stands for."""
    if isinstance(value, FunctionType):
        return [value]
    if isinstance(value, property):
        inner = [value.fget]
    else:
        inner = [getattr(value, "__func__", None), getattr(value, "__wrapped__", None)]
    return [function for item in inner if item is not None for function in unwrap_functions(item)]

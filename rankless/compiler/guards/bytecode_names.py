"""Read from a function's bytecode which names it uses."""

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
"""Code that uses one of these names may read attributes that it does not name."""

GLOBAL_OPCODES = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"})


@dataclass(frozen=True, eq=False)
class ReadNames:
    """The names that a function and its nested functions read; with `includes_all` it may read any attribute."""

    names: frozenset[str]
    includes_all: bool = False
    global_names: frozenset[str] = frozenset()
    imported_modules: frozenset[str] = frozenset()
    """Modules imported inside the function."""

    @functools.cached_property
    def explicit(self) -> "ReadNames":
        """The same names without the attributes that the code may read but does not name."""
        if not self.includes_all:
            return self
        return ReadNames(self.names, global_names=self.global_names, imported_modules=self.imported_modules)

    def select(self, namespace: Any) -> list[str]:
        """Return the names that are in a namespace, in the same order in every process."""
        if self.includes_all:
            return sorted(name for name in namespace if isinstance(name, str) and not name.startswith("__"))
        return sorted(self.names & namespace.keys())


NO_NAMES = ReadNames(frozenset())


class BytecodeReader:
    """Reads the names in code objects, each once."""

    def __init__(self) -> None:
        self._cache: dict[CodeType, ReadNames] = {}

    def read_names(self, code: CodeType) -> ReadNames:
        """Return the names that this code reads."""
        if code not in self._cache:
            names = extract_names(code)
            instructions = list(iterate_instructions(code))
            accessed_globally = frozenset(item.argval for item in instructions if item.opname in GLOBAL_OPCODES)
            self._cache[code] = ReadNames(
                names,
                includes_all=bool(names & DYNAMIC_ACCESS_NAMES),
                global_names=names if "globals" in names else accessed_globally,
                imported_modules=frozenset(item.argval for item in instructions if item.opname == "IMPORT_NAME"),
            )
        return self._cache[code]

    def imported_modules(self, code: CodeType, namespace: dict[str, Any]) -> list[tuple[str, ModuleType]]:
        """Return the modules that code imports when it runs."""
        package = namespace.get("__package__") or ""
        found = []
        for name in sorted(self.read_names(code).imported_modules):
            module = sys.modules.get(name) or sys.modules.get(f"{package}.{name}")
            if module is not None:
                found.append((name, module))
        return found


def iterate_instructions(code: CodeType) -> Iterator[dis.Instruction]:
    """Yield the instructions of a function and of its nested functions."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from iterate_instructions(constant)


def extract_names(code: CodeType) -> frozenset[str]:
    """Return the names in a function's code, and identifiers in its string constants: `getattr(settings, "scale")`."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= extract_names(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            names.add(constant)
    return frozenset(names)


def unwrap_functions(value: Any) -> list[FunctionType]:
    """Return the Python functions behind a method, property or decorated function."""
    if isinstance(value, FunctionType):
        return [value]
    if isinstance(value, property):
        inner = [value.fget]
    else:
        inner = [getattr(value, "__func__", None), getattr(value, "__wrapped__", None)]
    return [function for item in inner if item is not None for function in unwrap_functions(item)]

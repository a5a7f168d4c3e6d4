"""Plain Python values that a captured program has taken in, watched so that the program never goes stale.

Note [guards]: tracing runs the job's Python once and keeps only tensor operators, so a number read from a closure, a
global or an attribute is baked in. Found here by reading the code of the job, of the functions it names and of its
modules' `forward`: which names they read, and what simple values stand under them. A changed value means another
program; a value that the job changes itself cannot be part of any, and is refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from rankless.program.tracing import is_users_file

SIMPLE = (int, float, complex, bool, str, bytes, type(None))
MISSING = object()
DEEPEST = 3
"""How many attributes deep a job's names are followed: settings.optimizer.scale."""


@dataclass(frozen=True)
class Guard:
    """One value that the job reads: an entry of a namespace, or what a closure's cell holds."""

    label: str
    scope: dict[str, Any] | CellType
    name: str
    value: Any

    def read(self) -> Any:
        """The value as it is now."""
        return contents(self.scope) if isinstance(self.scope, CellType) else self.scope.get(self.name, MISSING)

    def holds(self) -> bool:
        """Whether the value is what it was."""
        now = self.read()
        return now is self.value or equal(now, self.value)


@dataclass(frozen=True)
class Guards:
    """All that was found for one capture; `entries` and `cells` are the same guards, laid out for a quick check."""

    guards: tuple[Guard, ...]
    entries: tuple[tuple[dict[str, Any], str, Any], ...]
    cells: tuple[tuple[CellType, Any], ...]

    def hold(self) -> bool:
        """Whether every value is what it was."""
        for scope, name, value in self.entries:
            now = scope.get(name, MISSING)
            if now is not value and not equal(now, value):
                return False
        return all((now := contents(cell)) is value or equal(now, value) for cell, value in self.cells)

    def first_changed(self) -> Guard | None:
        """The first value that is not what it was."""
        return next((guard for guard in self.guards if not guard.holds()), None)


def guards_of(function: Callable[..., Any], modules: Mapping[str, nn.Module]) -> Guards:
    """The guards for a job's function and its modules, with their values of now."""
    found = Finder()
    found.function(function)
    for name, module in modules.items():
        for path, part in module.named_modules(prefix=name):
            found.module(path, part)
    guards = tuple(found.guards.values())
    return Guards(
        guards=guards,
        entries=tuple((item.scope, item.name, item.value) for item in guards if isinstance(item.scope, dict)),
        cells=tuple((item.scope, item.value) for item in guards if isinstance(item.scope, CellType)),
    )


class Finder:
    """Walks from a function to all that its code names."""

    def __init__(self) -> None:
        self.guards: dict[tuple[int, str], Guard] = {}
        self.seen: set[int] = set()
        self.walked: set[tuple[int, int]] = set()
        self.names_of_type: dict[type, set[str]] = {}

    def function(self, function: Any) -> None:
        """Closure cells and globals that a Python function of the user reads, and the functions it names."""
        if isinstance(function, MethodType):
            function = function.__func__
        if (
            not isinstance(function, FunctionType)
            or id(function) in self.seen
            or not is_users_file(function.__code__.co_filename)
        ):
            return
        self.seen.add(id(function))
        names = names_in(function.__code__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self.found(Guard(name, cell, name, contents(cell)), names)
        scope = function.__globals__
        for name in sorted(names & scope.keys()):
            self.found(Guard(name, scope, name, scope[name]), names)

    def module(self, path: str, module: nn.Module) -> None:
        """Simple attributes of a module that its code reads, and what that code reads besides."""
        kind = type(module)
        if kind not in self.names_of_type:
            methods = methods_of(kind)
            self.names_of_type[kind] = set().union(*(names_in(method.__code__) for method in methods))
            for method in methods:
                self.function(method)
        self.attributes(path, module, self.names_of_type[kind], depth=0)

    def attributes(self, label: str, value: Any, names: set[str], depth: int) -> None:
        """The attributes of an object that code names."""
        scope = getattr(value, "__dict__", None)
        if not isinstance(scope, dict) or (id(value), id(names)) in self.walked:
            return
        self.walked.add((id(value), id(names)))
        for name in sorted((names & scope.keys()) - (OWN_TABLES if isinstance(value, nn.Module) else frozenset())):
            self.found(Guard(f"{label}.{name}", scope, name, scope[name]), names, depth + 1)

    def simple(self, guard: Guard) -> None:
        """Keep a guard if its value is simple."""
        if is_simple(guard.value):
            self.guards[id(guard.scope), guard.name] = replace(guard, value=frozen(guard.value))

    def found(self, guard: Guard, names: set[str], depth: int = 0) -> None:
        """Guard a value that a function names, or go on into it."""
        value = guard.value
        if is_simple(value):
            self.simple(guard)
            return
        if isinstance(value, list | dict | set):
            self.guards[id(guard.scope), guard.name] = replace(guard, value=Length(value, len(value)))
            return
        if isinstance(value, FunctionType | MethodType | nn.Module | Tensor | type):
            # Another object under the same name would be another program.
            self.guards[id(guard.scope), guard.name] = guard
            self.function(value)
        is_foreign = isinstance(value, ModuleType) and not is_users_file(getattr(value, "__file__", None))
        if depth < DEEPEST and not is_foreign and not isinstance(value, Tensor | type | FunctionType):
            self.attributes(guard.label, value, names, depth)


@dataclass(frozen=True)
class Length:
    """Stands for a container of other than simple values: the same one, as long as it was."""

    container: Any
    length: int


def methods_of(kind: type) -> list[FunctionType]:
    """The methods of a module's class that may run in `forward`."""
    return [
        method
        for parent in kind.__mro__
        if parent not in (nn.Module, object)
        for name, method in vars(parent).items()
        if isinstance(method, FunctionType) and name not in NOT_RUN
    ]


OWN_TABLES = frozenset(
    {"training", "_parameters", "_buffers", "_modules"}
    | {"_flat_weights", "_flat_weight_refs", "_flat_weights_names", "_all_weights"}
)
"""What modules keep of their parameters and modules, and recurrent ones write anew whenever a parameter is set. The
training flag is part of what tells programs apart anyway.
"""

NOT_RUN = frozenset({"__init__", "__repr__", "__setstate__", "extra_repr", "reset_parameters"})


def equal(now: Any, value: Any) -> bool:
    """Whether two plain values are equal; of other objects only the same one is."""
    if isinstance(value, Length):
        return now is value.container and len(now) == value.length
    return is_simple(value) and type(now) is type(value) and bool(now == value)


def is_simple(value: Any) -> bool:
    """Numbers, text and None, and small containers of them."""
    if isinstance(value, list | tuple | set | frozenset):
        return len(value) <= 64 and all(is_simple(item) for item in value)
    if type(value) is dict:
        return len(value) <= 64 and all(is_simple(key) and is_simple(item) for key, item in value.items())
    return isinstance(value, SIMPLE)


def frozen(value: Any) -> Any:
    """A copy of a container, so that a change in place is seen."""
    if isinstance(value, list | set):
        return type(value)(frozen(item) for item in value)
    if type(value) is dict:
        return {key: frozen(item) for key, item in value.items()}
    return value


def contents(cell: CellType) -> Any:
    """A closure cell's value; `MISSING` while it has none."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def names_in(code: CodeType) -> set[str]:
    """The names that a function reads, nested functions' included."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= names_in(constant)
    return names

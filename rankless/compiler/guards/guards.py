"""Guards on plain Python values that a captured program contains, so that the program never goes stale.

Note [guards]: a trace runs the job's Python once and keeps tensor operators only, so the program contains every number
read from a closure, a global or an attribute. Rankless discovers those reads in two ways: `guard_discovery` reads the
code of the job and of everything that it names, and `python_tracer` records which user code runs and with which
objects. A changed value requires another program. A value that the job itself changes fits no program, so capture
refuses it.

`GuardSet.all_hold` runs before every step. It compares many values at a time by identity first, and compares by value
only what is no longer the same object.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import is_
from types import CellType
from typing import Any, Protocol

from rankless.compiler.guards.module_guard import ModuleGuard
from rankless.compiler.tracing.value_snapshots import (
    MISSING,
    format_briefly,
    is_plain,
    is_same,
    list_elements,
    snapshot,
)


class Guard(Protocol):
    """One value that the job reads."""

    @property
    def label(self) -> str:
        """The value's name in the script."""

    def holds(self) -> bool:
        """Return whether the value is unchanged."""

    def describe_change(self) -> str:
        """Describe the old and the new value briefly."""


@dataclass(frozen=True)
class NamespaceGuard:
    """Guards an entry of a namespace: a global, or an attribute of an object or class; `MISSING` if it was absent."""

    label: str
    namespace: Mapping[str, Any]
    name: str
    value: Any

    def holds(self) -> bool:
        """Return whether the entry is unchanged."""
        return is_same(self.namespace.get(self.name, MISSING), self.value)

    def describe_change(self) -> str:
        """Describe the old and the new entry."""
        return f"was {format_briefly(self.value)} and is {format_briefly(self.namespace.get(self.name, MISSING))}"


@dataclass(frozen=True)
class CellGuard:
    """Guards the content of a closure cell."""

    label: str
    cell: CellType
    value: Any

    def holds(self) -> bool:
        """Return whether the content is unchanged."""
        return is_same(read_cell(self.cell), self.value)

    def describe_change(self) -> str:
        """Describe the old and the new content."""
        return f"was {format_briefly(self.value)} and is {format_briefly(read_cell(self.cell))}"


@dataclass(frozen=True)
class QueryGuard:
    """Guards the result of a query, such as a slot or the state of a cache."""

    label: str
    query: Callable[[], Any]
    value: Any

    def holds(self) -> bool:
        """Return whether the query returns the same."""
        return is_same(self.query(), self.value)

    def describe_change(self) -> str:
        """Describe the old and the new result."""
        return f"was {format_briefly(self.value)} and is {format_briefly(self.query())}"


@dataclass(frozen=True)
class ContainerGuard:
    """Guards the items of a container in their order: the same objects, or equal plain values."""

    label: str
    container: Any
    keys: tuple[Any, ...] | None
    values: tuple[Any, ...]

    def holds(self) -> bool:
        """Return whether the items are unchanged."""
        if len(self.container) != len(self.values):
            return False
        keys, values = list_elements(self.container)
        if all(map(is_, values, self.values)) and (self.keys is None or all(map(is_, keys, self.keys))):
            return True
        keys, values = list_elements(self.container)
        return all(map(is_same, values, self.values)) and (self.keys is None or all(map(is_same, keys, self.keys)))

    def describe_change(self) -> str:
        """Describe the change of length, or the first different item."""
        if len(self.container) != len(self.values):
            return f"was of length {len(self.values)} and is of length {len(self.container)}"
        keys, values = list_elements(self.container)
        names = range(len(self.values)) if self.keys is None else self.keys
        for name, now, before in zip(names, values, self.values, strict=True):
            if not is_same(now, before):
                return f"had {format_briefly(before)} under {name!r:.40} and has {format_briefly(now)}"
        return f"had the keys {format_briefly(self.keys)} and has {format_briefly(tuple(keys))}"


def read_cell(cell: CellType) -> Any:
    """Return a closure cell's value; `MISSING` while it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


@dataclass(frozen=True)
class GuardSet:
    """All guards of one capture. The fields after `guards` hold the same guards, arranged for a fast check."""

    guards: tuple[Guard, ...]
    identity_guards: tuple[NamespaceGuard, ...]
    namespaces: tuple[dict[str, Any], ...]
    names: tuple[str, ...]
    values: tuple[Any, ...]
    other_guards: tuple[Guard, ...]

    def all_hold(self) -> bool:
        """Return whether all guarded values are unchanged."""
        now = map(dict.get, self.namespaces, self.names, repeat(MISSING))
        if not all(map(is_, now, self.values)) and not all(entry.holds() for entry in self.identity_guards):
            return False
        return all(guard.holds() for guard in self.other_guards)

    def first_failing(self) -> Guard | None:
        """Return the first guard that does not hold."""
        return next((guard for guard in self.guards if not guard.holds()), None)


def make_guard_set(guards: Sequence[Guard], modules: ModuleGuard) -> GuardSet:
    """Arrange guards for a fast check; `guards` keeps the order of discovery."""
    identity_guards = tuple(
        guard for guard in guards if isinstance(guard, NamespaceGuard) and is_identity_comparable(guard)
    )
    quick = set(map(id, identity_guards))
    return GuardSet(
        guards=(*guards, modules),
        identity_guards=identity_guards,
        namespaces=tuple(entry.namespace for entry in identity_guards if isinstance(entry.namespace, dict)),
        names=tuple(entry.name for entry in identity_guards),
        values=tuple(entry.value for entry in identity_guards),
        other_guards=(modules, *(guard for guard in guards if id(guard) not in quick)),
    )


def is_identity_comparable(entry: NamespaceGuard) -> bool:
    """Return whether identity alone can prove an entry unchanged.

    For a plain list the guard keeps a copy, which is never the same object.
    """
    return isinstance(entry.namespace, dict) and (not is_plain(entry.value) or snapshot(entry.value) is entry.value)

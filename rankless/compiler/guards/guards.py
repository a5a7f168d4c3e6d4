"""Plain Python values that a captured program has taken in, watched so that the program never goes stale.

Note [guards]: tracing runs the job's Python once and keeps only tensor operators, so a number read from a closure, a
global or an attribute is baked in. What it reads is found in two ways (`finding`): by reading the code of the job and
of what that names, and by watching which of the user's code really runs, and with which objects (`watching`).
A changed value means another program; a value that the job changes itself cannot be part of any, and is refused.

`Guards.hold` runs before every step, so it compares by identity first, many values at a time; only what is not the same
object is compared by value.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import is_
from types import CellType
from typing import Any, Protocol

from rankless.compiler.guards.module_state import ModuleGuard
from rankless.compiler.tracing.plain_values import MISSING, format_briefly, is_plain, is_same, list_elements, snapshot


class Guard(Protocol):
    """One thing that the job reads."""

    @property
    def label(self) -> str:
        """What the script calls it."""

    def holds(self) -> bool:
        """Whether it is what it was."""

    def describe_change(self) -> str:
        """What it was and what it is, in few words."""


@dataclass(frozen=True)
class NamespaceGuard:
    """An entry of a namespace: a global, an attribute of an object or of a class; `MISSING` where there was none."""

    label: str
    scope: Mapping[str, Any]
    name: str
    value: Any

    def holds(self) -> bool:
        """Whether the same stands there."""
        return is_same(self.scope.get(self.name, MISSING), self.value)

    def describe_change(self) -> str:
        """What stood there and what stands there now."""
        return f"was {format_briefly(self.value)} and is {format_briefly(self.scope.get(self.name, MISSING))}"


@dataclass(frozen=True)
class CellGuard:
    """What a closure's cell holds."""

    label: str
    cell: CellType
    value: Any

    def holds(self) -> bool:
        """Whether it holds the same."""
        return is_same(read_cell(self.cell), self.value)

    def describe_change(self) -> str:
        """What it held and what it holds now."""
        return f"was {format_briefly(self.value)} and is {format_briefly(read_cell(self.cell))}"


@dataclass(frozen=True)
class QueryGuard:
    """What something says when asked: a slot, the state of a cache."""

    label: str
    query: Callable[[], Any]
    value: Any

    def holds(self) -> bool:
        """Whether the answer is the same."""
        return is_same(self.query(), self.value)

    def describe_change(self) -> str:
        """What it said and what it says now."""
        return f"was {format_briefly(self.value)} and is {format_briefly(self.query())}"


@dataclass(frozen=True)
class ContainerGuard:
    """The items of a container, in their order: the same objects, or equal plain values."""

    label: str
    container: Any
    keys: tuple[Any, ...] | None
    values: tuple[Any, ...]

    def holds(self) -> bool:
        """Whether it holds what it held."""
        if len(self.container) != len(self.values):
            return False
        keys, values = list_elements(self.container)
        if all(map(is_, values, self.values)) and (self.keys is None or all(map(is_, keys, self.keys))):
            return True
        keys, values = list_elements(self.container)
        return all(map(is_same, values, self.values)) and (self.keys is None or all(map(is_same, keys, self.keys)))

    def describe_change(self) -> str:
        """How its length has changed, or which item is another."""
        if len(self.container) != len(self.values):
            return f"was of length {len(self.values)} and is of length {len(self.container)}"
        keys, values = list_elements(self.container)
        names = range(len(self.values)) if self.keys is None else self.keys
        for name, now, before in zip(names, values, self.values, strict=True):
            if not is_same(now, before):
                return f"had {format_briefly(before)} under {name!r:.40} and has {format_briefly(now)}"
        return f"had the keys {format_briefly(self.keys)} and has {format_briefly(tuple(keys))}"


def read_cell(cell: CellType) -> Any:
    """A closure cell's value; `MISSING` while it has none."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


@dataclass(frozen=True)
class GuardSet:
    """All that was found for one capture; the other fields are the same guards, laid out for a quick check."""

    guards: tuple[Guard, ...]
    entries: tuple[NamespaceGuard, ...]
    scopes: tuple[dict[str, Any], ...]
    names: tuple[str, ...]
    values: tuple[Any, ...]
    others: tuple[Guard, ...]

    def all_hold(self) -> bool:
        """Whether everything is what it was."""
        now = map(dict.get, self.scopes, self.names, repeat(MISSING))
        if not all(map(is_, now, self.values)) and not all(entry.holds() for entry in self.entries):
            return False
        return all(guard.holds() for guard in self.others)

    def first_failing(self) -> Guard | None:
        """The first guard that does not hold."""
        return next((guard for guard in self.guards if not guard.holds()), None)


def make_guard_set(guards: Sequence[Guard], modules: ModuleGuard) -> GuardSet:
    """Guards in the order that they were found, and in the layout that is quick to check."""
    entries = tuple(guard for guard in guards if isinstance(guard, NamespaceGuard) and is_identity_comparable(guard))
    quick = set(map(id, entries))
    return GuardSet(
        guards=(*guards, modules),
        entries=entries,
        scopes=tuple(entry.scope for entry in entries if isinstance(entry.scope, dict)),
        names=tuple(entry.name for entry in entries),
        values=tuple(entry.value for entry in entries),
        others=(modules, *(guard for guard in guards if id(guard) not in quick)),
    )


def is_identity_comparable(entry: NamespaceGuard) -> bool:
    """Whether it can be compared by identity: a copy is kept of a plain list, which is never the same object."""
    return isinstance(entry.scope, dict) and (not is_plain(entry.value) or snapshot(entry.value) is entry.value)

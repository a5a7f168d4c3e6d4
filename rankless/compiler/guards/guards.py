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

from rankless.compiler.guards.module_state import ModuleState
from rankless.compiler.tracing.plain_values import MISSING, brief, elements, frozen, is_simple, same


class Guard(Protocol):
    """One thing that the job reads."""

    @property
    def label(self) -> str:
        """What the script calls it."""

    def holds(self) -> bool:
        """Whether it is what it was."""

    def change(self) -> str:
        """What it was and what it is, in few words."""


@dataclass(frozen=True)
class Entry:
    """An entry of a namespace: a global, an attribute of an object or of a class; `MISSING` where there was none."""

    label: str
    scope: Mapping[str, Any]
    name: str
    value: Any

    def holds(self) -> bool:
        """Whether the same stands there."""
        return same(self.scope.get(self.name, MISSING), self.value)

    def change(self) -> str:
        """What stood there and what stands there now."""
        return f"was {brief(self.value)} and is {brief(self.scope.get(self.name, MISSING))}"


@dataclass(frozen=True)
class Cell:
    """What a closure's cell holds."""

    label: str
    cell: CellType
    value: Any

    def holds(self) -> bool:
        """Whether it holds the same."""
        return same(contents(self.cell), self.value)

    def change(self) -> str:
        """What it held and what it holds now."""
        return f"was {brief(self.value)} and is {brief(contents(self.cell))}"


@dataclass(frozen=True)
class Answer:
    """What something says when asked: a slot, the state of a cache."""

    label: str
    ask: Callable[[], Any]
    value: Any

    def holds(self) -> bool:
        """Whether the answer is the same."""
        return same(self.ask(), self.value)

    def change(self) -> str:
        """What it said and what it says now."""
        return f"was {brief(self.value)} and is {brief(self.ask())}"


@dataclass(frozen=True)
class Items:
    """The items of a container, in their order: the same objects, or equal plain values."""

    label: str
    container: Any
    keys: tuple[Any, ...] | None
    values: tuple[Any, ...]

    def holds(self) -> bool:
        """Whether it holds what it held."""
        if len(self.container) != len(self.values):
            return False
        keys, values = elements(self.container)
        if all(map(is_, values, self.values)) and (self.keys is None or all(map(is_, keys, self.keys))):
            return True
        keys, values = elements(self.container)
        return all(map(same, values, self.values)) and (self.keys is None or all(map(same, keys, self.keys)))

    def change(self) -> str:
        """How its length has changed, or which item is another."""
        if len(self.container) != len(self.values):
            return f"was of length {len(self.values)} and is of length {len(self.container)}"
        keys, values = elements(self.container)
        names = range(len(self.values)) if self.keys is None else self.keys
        for name, now, before in zip(names, values, self.values, strict=True):
            if not same(now, before):
                return f"had {brief(before)} under {name!r:.40} and has {brief(now)}"
        return f"had the keys {brief(self.keys)} and has {brief(tuple(keys))}"


def contents(cell: CellType) -> Any:
    """A closure cell's value; `MISSING` while it has none."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


@dataclass(frozen=True)
class Guards:
    """All that was found for one capture; the other fields are the same guards, laid out for a quick check."""

    guards: tuple[Guard, ...]
    entries: tuple[Entry, ...]
    scopes: tuple[dict[str, Any], ...]
    names: tuple[str, ...]
    values: tuple[Any, ...]
    others: tuple[Guard, ...]

    def hold(self) -> bool:
        """Whether everything is what it was."""
        now = map(dict.get, self.scopes, self.names, repeat(MISSING))
        if not all(map(is_, now, self.values)) and not all(entry.holds() for entry in self.entries):
            return False
        return all(guard.holds() for guard in self.others)

    def first_changed(self) -> Guard | None:
        """The first guard that does not hold."""
        return next((guard for guard in self.guards if not guard.holds()), None)


def laid_out(guards: Sequence[Guard], modules: ModuleState) -> Guards:
    """Guards in the order that they were found, and in the layout that is quick to check."""
    entries = tuple(guard for guard in guards if isinstance(guard, Entry) and is_quick(guard))
    quick = set(map(id, entries))
    return Guards(
        guards=(*guards, modules),
        entries=entries,
        scopes=tuple(entry.scope for entry in entries if isinstance(entry.scope, dict)),
        names=tuple(entry.name for entry in entries),
        values=tuple(entry.value for entry in entries),
        others=(modules, *(guard for guard in guards if id(guard) not in quick)),
    )


def is_quick(entry: Entry) -> bool:
    """Whether it can be compared by identity: a copy is kept of a plain list, which is never the same object."""
    return isinstance(entry.scope, dict) and (not is_simple(entry.value) or frozen(entry.value) is entry.value)

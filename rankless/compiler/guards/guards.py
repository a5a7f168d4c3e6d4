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
from itertools import chain, repeat
from operator import attrgetter, is_, methodcaller
from types import CellType
from typing import Any, Protocol

import torch
import torch.nn.modules.module as module_globals
from torch import Tensor, nn

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
class QueryGuard:
    """Guards the result of a query, such as a slot, a closure's cell or the state of a cache."""

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


HOOK_TABLE_NAMES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
GLOBAL_HOOK_TABLES = tuple(
    table
    for name, table in vars(module_globals).items()
    if name.startswith("_global_") and name.endswith("_hooks") and isinstance(table, dict)
)
TENSOR_ATTRIBUTES: tuple[Callable[[Any], Any], ...] = (
    *map(attrgetter, ("shape", "dtype", "device", "requires_grad")),
    methodcaller("stride"),
)
TENSOR_HOOKS = (attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks"))
get_training = attrgetter("training")


def describe_tensor(tensor: Tensor) -> tuple[object, ...]:
    """Return what a program depends on in a tensor besides its values; a symbolic size counts by its name."""
    shape = tensor.shape
    if not all(isinstance(size, int) for size in shape):
        return tuple(map(repr, shape)), tensor.dtype, tensor.device, tensor.requires_grad
    return shape, tensor.dtype, tensor.device, tensor.requires_grad


class ModuleGuard:
    """Guards modules: which submodules, of which class, in which mode, with which hooks and tensors.

    A script may replace a buffer by another of the same shape and dtype, because programs read the present one. It may
    not replace a parameter, because gradients and tied weights belong to the tensor itself. `training` gives the
    expected modes by module id where they differ from the present ones; if it is None, the guard ignores modes.
    """

    label = "model"

    def __init__(self, submodules: Mapping[str, nn.Module], training: Mapping[int, bool] | None) -> None:
        self._submodules = list(submodules.values())
        self._paths = list(submodules)
        self._classes = list(map(type, self._submodules))
        self._training = (
            None
            if training is None
            else [training.get(id(submodule), submodule.training) for submodule in self._submodules]
        )
        tables = [
            (f"{path}.{name}", table)
            for path, submodule in submodules.items()
            for name in ("_modules", *HOOK_TABLE_NAMES)
            if isinstance(table := vars(submodule).get(name), dict)
        ]
        tables += [("a hook of all modules", table) for table in GLOBAL_HOOK_TABLES]
        self._empty_tables: list[dict[str, Any]] = [table for _, table in tables if not table]
        self._filled_tables = [(label, table, [*table], [*table.values()]) for label, table in tables if table]
        tensor_tables = [table for module in self._submodules for table in (module._parameters, module._buffers)]
        self._tables = [table for table in tensor_tables if table]
        self._empty_tables += [table for table in tensor_tables if not table]
        self._names = list(chain.from_iterable(self._tables))
        self._tensors = list_tensors(self._tables)
        self._is_parameter = [isinstance(tensor, nn.Parameter) for tensor in self._tensors]
        self._tensor_attributes = list_attributes(self._tensors)
        self._hook_counts = count_tensor_hooks(self._tensors)

    def holds(self) -> bool:
        """Return whether everything is unchanged."""
        return self._find_difference() is None

    def describe_change(self) -> str:
        """Describe the first change."""
        return self._find_difference() or "is unchanged"

    def _find_difference(self) -> str | None:
        if any(self._empty_tables):
            return "has a new submodule, hook or tensor"
        for label, table, keys, values in self._filled_tables:
            if len(table) != len(keys) or not all(map(is_, table.values(), values)) or [*table] != keys:
                return f"has different entries in {label}"
        if list(map(type, self._submodules)) != self._classes:
            return "has a submodule of another class"
        if self._training is not None and list(map(get_training, self._submodules)) != self._training:
            return "is in another mode (train or eval)"
        return self._find_tensor_difference()

    def _find_tensor_difference(self) -> str | None:
        if list(chain.from_iterable(self._tables)) != self._names:
            return "has tensors under other names"
        tensors = list_tensors(self._tables)
        if not all(map(is_, tensors, self._tensors)):
            for now, before, is_parameter in zip(tensors, self._tensors, self._is_parameter, strict=True):
                if now is not before and (is_parameter or isinstance(now, nn.Parameter)):
                    return "has a parameter that was replaced"
            if find_aliases(tensors) != find_aliases(self._tensors):
                return "has buffers that became, or no longer are, the same tensor"
        if list_attributes(tensors) != self._tensor_attributes:
            return "has a tensor of another shape, memory layout, dtype or requires_grad"
        if count_tensor_hooks(tensors) != self._hook_counts:
            return "has different hooks on its parameters"
        return None


def list_tensors(tables: Sequence[dict[str, Any]]) -> list[Any]:
    """Return all entries of several tables, including None."""
    return list(chain.from_iterable(map(dict.values, tables)))


def list_attributes(tensors: Sequence[Any]) -> tuple[list[Any], ...]:
    """Return shapes, dtypes, devices and requires_grad of the tensors."""
    if any(map(is_, tensors, repeat(None))):
        tensors = [tensor for tensor in tensors if tensor is not None]
    with torch._C.DisableTorchFunctionSubclass():  # divided parameters know their own shapes
        return tuple(list(map(attribute, tensors)) for attribute in TENSOR_ATTRIBUTES)


def count_tensor_hooks(tensors: Sequence[Any]) -> tuple[int, ...]:
    """Return how many tensors have hooks of their own, per kind of hook."""
    present = [tensor for tensor in tensors if tensor is not None]
    with torch._C.DisableTorchFunctionSubclass():
        return tuple(sum(map(bool, map(hooks, present))) for hooks in TENSOR_HOOKS)


def find_aliases(tensors: Sequence[Tensor | None]) -> list[int]:
    """Return for each tensor the index of its first occurrence, which shows tensors that are identical."""
    first: dict[int, int] = {}
    return [-1 if tensor is None else first.setdefault(id(tensor), index) for index, tensor in enumerate(tensors)]


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

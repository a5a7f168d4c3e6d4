"""Finds models and states of optimizers that the script has changed outside jobs, which ranks must compare."""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, is_
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.optim import Optimizer


class ModelChangeDetector:
    """Detects changes of tensors outside jobs, by PyTorch's version counter and address of each tensor.

    All jobs of a process share it, because a step of one job changes the models of another. In-place changes that
    bypass the counter, such as `p.data.mul_(2)`, are found by `check_synchronized_every`.
    """

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[Tensor]] = {}
        """By the tensor's id. A tensor that dies is forgotten, because another may get its id."""
        self._versions: dict[int, tuple[int, int]] = {}
        """By the tensor's id: its version, and the address of its data, which `p.data = …` changes."""

    def have_changed(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether one of the tensors is new, or has changed since its version was recorded."""
        return list(map(self._versions.get, map(id, tensors))) != _read_versions(tensors)

    def record_versions(self, tensors: Sequence[Tensor]) -> None:
        """Record the tensors as unchanged, with their versions of now."""
        keys = list(map(id, tensors))
        if not self._references.keys() >= set(keys):
            for key, tensor in zip(keys, tensors, strict=True):
                if key not in self._references:
                    self._references[key] = weakref.ref(tensor, partial(self._forget, key))
        self._versions.update(zip(keys, _read_versions(tensors), strict=True))

    def _forget(self, key: int, _reference: weakref.ref[Tensor]) -> None:
        self._references.pop(key, None)
        self._versions.pop(key, None)


def _read_versions(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return the version of each tensor and the address of its data."""
    with torch._C.DisableTorchFunctionSubclass():  # a divided tensor would gather its elements
        try:
            addresses = list(map(Tensor.data_ptr, tensors))
        except RuntimeError:
            addresses = list(map(_address, tensors))
        return list(zip(map(_get_version, tensors), addresses, strict=True))


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's data, or 0 for a tensor without one, such as a sparse tensor."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


_get_version = attrgetter("_version")


@dataclass(frozen=True)
class StateEntry:
    """One value of an optimizer's state: of which parameter, under which key, such as "exp_avg"."""

    parameter: int
    """The parameter's number in the optimizer's groups, or -1 for state that belongs to no parameter."""
    key: str
    value: Any


@dataclass(frozen=True)
class _Marks:
    """What the state of an optimizer looked like.

    It keeps no tensor alive. As long as a reference to a dead tensor exists, no other tensor has the same reference.
    """

    values: list[Any]
    """Weak references to tensors, and other values as they are."""
    versions: list[int]

    def match(self, other: "_Marks") -> bool:
        """Return whether both are of the same objects at the same versions."""
        same_count = len(self.values) == len(other.values)
        return same_count and self.versions == other.versions and all(map(is_, self.values, other.values))


class OptimizerChanges:
    """Detects changes of optimizer state outside jobs, by the identity of each value and the version of each tensor.

    All jobs of a process share it, because jobs may share an optimizer. It finds `load_state_dict`, replaced values and
    in-place operations. Changes that bypass PyTorch's version counter, such as those through `.data`, are found by
    `check_synchronized_every`.
    """

    def __init__(self) -> None:
        self._marks: WeakKeyDictionary[Optimizer, _Marks] = WeakKeyDictionary()

    def record(self, optimizer: Optimizer) -> None:
        """Record the optimizer's state as unchanged. A job calls it after each step."""
        self._marks[optimizer] = _mark(optimizer)

    def forget(self, optimizer: Optimizer) -> None:
        """Take all of the state for changed, as every rank of a new group does: one may have looked before."""
        self._marks.pop(optimizer, None)

    def find_changes(self, optimizer: Optimizer) -> list[StateEntry] | None:
        """Return the values that have changed since the state was recorded, or None if nothing has.

        It returns all values if their number has changed. The state then counts as recorded.
        """
        known, found = self._marks.get(optimizer), _mark(optimizer)
        if not found.values if known is None else known.match(found):
            return None
        self._marks[optimizer] = found
        entries = list_state_entries(optimizer)
        if known is not None and len(known.values) == len(found.values):
            is_changed = [
                old is not new or before != after
                for old, new, before, after in zip(
                    known.values, found.values, known.versions, found.versions, strict=True
                )
            ]
            entries = [entry for entry, changed in zip(entries, is_changed, strict=True) if changed]
        return sorted(entries, key=lambda entry: (entry.parameter, entry.key))


def _mark(optimizer: Optimizer) -> _Marks:
    state = _get_state(optimizer)
    try:
        values = [value for owned in state.values() for value in owned.values()]
        return _Marks([ref(value) for value in values], [value._version for value in values])
    except (AttributeError, TypeError):  # some values are no tensors, or state of no parameter is no dict
        values = [
            value for owned in state.values() for value in (owned.values() if isinstance(owned, dict) else [owned])
        ]
    versions = [value._version if isinstance(value, Tensor) else 0 for value in values]
    return _Marks([ref(value) if isinstance(value, Tensor) else value for value in values], versions)


def _get_state(optimizer: Optimizer) -> Mapping[Any, Any]:
    """Return an optimizer's state. A class of the script's may have none, or another kind of it."""
    state = getattr(optimizer, "state", None)
    return state if isinstance(state, Mapping) else {}


def list_state_entries(optimizer: Optimizer) -> list[StateEntry]:
    """Return all values of an optimizer's state, in the order in which the state holds them."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    found = []
    for owner, values in _get_state(optimizer).items():
        number = numbers.get(id(owner), -1)
        owned = values if isinstance(values, dict) else {"": values}
        prefix = "" if number >= 0 else f"{owner if isinstance(owner, str) else type(owner).__name__} "
        found += [StateEntry(number, f"{prefix}{key}".strip(), value) for key, value in owned.items()]
    return found

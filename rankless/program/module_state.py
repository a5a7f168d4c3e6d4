"""What modules are made of, watched: their parts, tensors, hooks and flags."""

from collections.abc import Mapping, Sequence
from operator import attrgetter, is_
from typing import Any

import torch.nn.modules.module as of_all_modules
from torch import Tensor, nn

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
HOOKS_OF_ALL = tuple(
    table
    for name, table in vars(of_all_modules).items()
    if name.startswith("_global_") and name.endswith("_hooks") and isinstance(table, dict)
)
kind_of = attrgetter("shape", "dtype", "requires_grad")


class ModuleState:
    """A snapshot of modules: which parts, of which class, in which mode, with which hooks and tensors.

    A buffer may be replaced by another of its kind, for programs take what stands there; a parameter may not, for
    gradients and ties belong to the very tensor. `training` gives the modes that count, by id, where they are not those
    of now; without it modes are not watched.
    """

    label = "model"

    def __init__(self, parts: Mapping[str, nn.Module], training: Mapping[int, bool] | None) -> None:
        self._parts = list(parts.values())
        self._paths = list(parts)
        self._kinds = list(map(type, self._parts))
        self._training = None if training is None else [training.get(id(part), part.training) for part in self._parts]
        tables = [
            (f"{path}.{name}", table)
            for path, part in parts.items()
            for name in ("_modules", *HOOKS)
            if isinstance(table := vars(part).get(name), dict)
        ]
        tables += [("a hook of all modules", table) for table in HOOKS_OF_ALL]
        self._empty = [table for _, table in tables if not table]
        self._full = [(label, table, [*table], [*table.values()]) for label, table in tables if table]
        self._parameter_tables = [part._parameters for part in self._parts if part._parameters]
        self._no_tensors = [table for part in self._parts for table in (part._parameters, part._buffers) if not table]
        self._buffer_tables = [part._buffers for part in self._parts if part._buffers]
        self._parameter_names = keys_of(self._parameter_tables)
        self._buffer_names = keys_of(self._buffer_tables)
        self._parameters = tensors_of(self._parameter_tables)
        self._buffers = tensors_of(self._buffer_tables)
        self._parameter_kinds = kinds_of(self._parameters)
        self._buffer_kinds = kinds_of(self._buffers)

    def holds(self) -> bool:
        """Whether all is what it was."""
        return self._difference() is None

    def change(self) -> str:
        """What has changed first."""
        return self._difference() or "is as it was"

    def _difference(self) -> str | None:
        if any(self._empty) or any(self._no_tensors):
            return "has got a part, a hook or a tensor that it had not"
        for label, table, keys, values in self._full:
            if len(table) != len(keys) or not all(map(is_, table.values(), values)) or [*table] != keys:
                return f"has other entries in {label}"
        if list(map(type, self._parts)) != self._kinds:
            return "has a part that is of another class"
        if self._training is not None and [part.training for part in self._parts] != self._training:
            return "is in another mode, train or eval"
        return self._tensor_difference()

    def _tensor_difference(self) -> str | None:
        parameters = tensors_of(self._parameter_tables)
        if len(parameters) != len(self._parameters) or not all(map(is_, parameters, self._parameters)):
            return "has a parameter that is another tensor"
        buffers = tensors_of(self._buffer_tables)
        if len(buffers) != len(self._buffers):
            return "has other buffers"
        if not all(map(is_, buffers, self._buffers)) and aliases(buffers) != aliases(self._buffers):
            return "has buffers that are one tensor, or no longer are"
        if kinds_of(parameters) != self._parameter_kinds or kinds_of(buffers) != self._buffer_kinds:
            return "has a tensor of another shape, dtype or requires_grad"
        tables = (self._parameter_tables, self._buffer_tables)
        if [keys_of(table) for table in tables] != [self._parameter_names, self._buffer_names]:
            return "has tensors under other names"
        return None


def tensors_of(tables: Sequence[Mapping[str, Tensor | None]]) -> list[Tensor | None]:
    """All entries of several tables."""
    return [tensor for table in tables for tensor in table.values()]


def keys_of(tables: Sequence[Mapping[str, Tensor | None]]) -> list[str]:
    """All names of several tables."""
    return [name for table in tables for name in table]


def kinds_of(tensors: Sequence[Tensor | None]) -> list[Any]:
    """Shapes and dtypes, and which need gradients."""
    return [None if tensor is None else kind_of(tensor) for tensor in tensors]


def aliases(tensors: Sequence[Tensor | None]) -> list[int]:
    """For each tensor the first place where it stands: which are one."""
    first: dict[int, int] = {}
    return [-1 if tensor is None else first.setdefault(id(tensor), place) for place, tensor in enumerate(tensors)]

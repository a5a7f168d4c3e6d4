"""A guard on modules: their submodules, tensors, hooks and modes."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch
import torch.nn.modules.module as module_globals
from torch import Tensor, nn

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
        self._empty_tables = [table for _, table in tables if not table]
        self._filled_tables = [(label, table, [*table], [*table.values()]) for label, table in tables if table]
        self._tables = [
            table for submodule in self._submodules for table in (submodule._parameters, submodule._buffers) if table
        ]
        self._empty_tensor_tables = [
            table
            for submodule in self._submodules
            for table in (submodule._parameters, submodule._buffers)
            if not table
        ]
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
        if any(self._empty_tables) or any(self._empty_tensor_tables):
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

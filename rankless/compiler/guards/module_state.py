"""What modules are made of, watched: their parts, tensors, hooks and flags."""

from collections.abc import Mapping, Sequence
from itertools import chain, repeat
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
ATTRIBUTES = tuple(map(attrgetter, ("shape", "dtype", "device", "requires_grad")))
TENSOR_HOOKS = (attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks"))
training_of = attrgetter("training")


def kind_of(tensor: Tensor) -> tuple[object, ...]:
    """All that a program takes in of a tensor but its values; a size that varies counts by its name."""
    shape = tensor.shape
    if not all(isinstance(size, int) for size in shape):
        return tuple(map(repr, shape)), tensor.dtype, tensor.device, tensor.requires_grad
    return shape, tensor.dtype, tensor.device, tensor.requires_grad


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
        self._tables = [table for part in self._parts for table in (part._parameters, part._buffers) if table]
        self._no_tensors = [table for part in self._parts for table in (part._parameters, part._buffers) if not table]
        self._names = list(chain.from_iterable(self._tables))
        self._tensors = tensors_of(self._tables)
        self._are_parameters = [isinstance(tensor, nn.Parameter) for tensor in self._tensors]
        self._kinds_of_tensors = kinds_of(self._tensors)
        self._hooked = hooks_on(self._tensors)

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
        if self._training is not None and list(map(training_of, self._parts)) != self._training:
            return "is in another mode, train or eval"
        return self._tensor_difference()

    def _tensor_difference(self) -> str | None:
        if list(chain.from_iterable(self._tables)) != self._names:
            return "has tensors under other names"
        tensors = tensors_of(self._tables)
        if not all(map(is_, tensors, self._tensors)):
            for now, before, is_parameter in zip(tensors, self._tensors, self._are_parameters, strict=True):
                if now is not before and (is_parameter or isinstance(now, nn.Parameter)):
                    return "has a parameter that is another tensor"
            if aliases(tensors) != aliases(self._tensors):
                return "has buffers that are one tensor, or no longer are"
        if kinds_of(tensors) != self._kinds_of_tensors:
            return "has a tensor of another shape, dtype or requires_grad"
        if hooks_on(tensors) != self._hooked:
            return "has other hooks on its parameters"
        return None


def tensors_of(tables: Sequence[dict[str, Any]]) -> list[Any]:
    """All entries of several tables, None included."""
    return list(chain.from_iterable(map(dict.values, tables)))


def kinds_of(tensors: Sequence[Any]) -> tuple[list[Any], ...]:
    """Shapes, dtypes, devices, and which need gradients."""
    if any(map(is_, tensors, repeat(None))):
        tensors = [tensor for tensor in tensors if tensor is not None]
    return tuple(list(map(attribute, tensors)) for attribute in ATTRIBUTES)


def hooks_on(tensors: Sequence[Any]) -> tuple[int, ...]:
    """How many tensors have hooks of their own, of each kind."""
    present = [tensor for tensor in tensors if tensor is not None]
    return tuple(sum(map(bool, map(hooks, present))) for hooks in TENSOR_HOOKS)


def aliases(tensors: Sequence[Tensor | None]) -> list[int]:
    """For each tensor the first place where it stands: which are one."""
    first: dict[int, int] = {}
    return [-1 if tensor is None else first.setdefault(id(tensor), place) for place, tensor in enumerate(tensors)]

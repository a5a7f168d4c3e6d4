"""Finds models that the script has changed outside jobs, which ranks must compare."""

import weakref
from collections.abc import Sequence
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor


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

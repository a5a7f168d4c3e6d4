"""Finds models that the script has changed outside jobs, which ranks must compare."""

import weakref
from collections.abc import Iterable
from functools import partial

from torch import Tensor


class ModelChanges:
    """Detects changes of tensors outside jobs, by the version counter that PyTorch keeps of each tensor.

    All jobs of a process share it, because a step of one job changes the models of another. Changes that bypass the
    counter, such as those through `.data`, are found by `check_every`.
    """

    def __init__(self) -> None:
        self._versions: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def have_changed(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether one of the tensors is new, or has changed since its version was recorded."""
        for tensor in tensors:
            known = self._versions.get(id(tensor))
            if known is None or known[0]() is not tensor or known[1] != tensor._version:
                return True
        return False

    def record_versions(self, tensors: Iterable[Tensor]) -> None:
        """Record the tensors as unchanged, with their versions of now."""
        for tensor in tensors:
            key = id(tensor)
            known = self._versions.get(key)
            if known is None or known[0]() is not tensor:
                self._versions[key] = (weakref.ref(tensor, partial(self._forget, key)), tensor._version)
            elif known[1] != tensor._version:
                self._versions[key] = (known[0], tensor._version)

    def _forget(self, key: int, _reference: weakref.ref[Tensor]) -> None:
        self._versions.pop(key, None)

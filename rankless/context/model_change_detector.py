"""Finds models that the script has changed outside jobs, which ranks must compare."""

import weakref
from collections.abc import Iterable
from functools import partial

from torch import Tensor


class ModelChangeDetector:
    """Detects changes of tensors outside jobs, by PyTorch's version counter and address of each tensor.

    All jobs of a process share it, because a step of one job changes the models of another. In-place changes that
    bypass the counter, such as `p.data.mul_(2)`, are found by `check_synchronized_every`.
    """

    def __init__(self) -> None:
        self._versions: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}
        """By the tensor's id: the tensor, its version, and the address of its data, which `p.data = …` changes."""

    def have_changed(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether one of the tensors is new, or has changed since its version was recorded."""
        for tensor in tensors:
            known = self._versions.get(id(tensor))
            if known is None or known[0]() is not tensor or known[1] != tensor._version or known[2] != _address(tensor):
                return True
        return False

    def record_versions(self, tensors: Iterable[Tensor]) -> None:
        """Record the tensors as unchanged, with their versions of now."""
        for tensor in tensors:
            key = id(tensor)
            known = self._versions.get(key)
            if known is None or known[0]() is not tensor:
                reference = weakref.ref(tensor, partial(self._forget, key))
                self._versions[key] = (reference, tensor._version, _address(tensor))
            elif known[1] != tensor._version or known[2] != _address(tensor):
                self._versions[key] = (known[0], tensor._version, _address(tensor))

    def _forget(self, key: int, _reference: weakref.ref[Tensor]) -> None:
        self._versions.pop(key, None)


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's data, or 0 for a tensor without one, such as a sparse tensor."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0

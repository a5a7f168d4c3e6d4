"""Which models were changed outside jobs, and so must be compared between ranks."""

import weakref
from collections.abc import Iterable
from functools import partial

from torch import Tensor


class ModelChanges:
    """Tells whether tensors were changed outside jobs, by PyTorch's own count of changes in place.

    Shared by all jobs of a process, for one job's step changes another's models. What goes past the count, as
    `.data` does, is for `check_synchronized_every`.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def have_changed(self, tensors: Iterable[Tensor]) -> bool:
        """Whether one of them is new, or not as it was when it was noted."""
        for tensor in tensors:
            known = self._seen.get(id(tensor))
            if known is None or known[0]() is not tensor or known[1] != tensor._version:
                return True
        return False

    def record_versions(self, tensors: Iterable[Tensor]) -> None:
        """Take them as they are now for unchanged."""
        for tensor in tensors:
            key = id(tensor)
            known = self._seen.get(key)
            if known is None or known[0]() is not tensor:
                self._seen[key] = (weakref.ref(tensor, partial(self._forget, key)), tensor._version)
            elif known[1] != tensor._version:
                self._seen[key] = (known[0], tensor._version)

    def _forget(self, key: int, _reference: weakref.ref[Tensor]) -> None:
        self._seen.pop(key, None)

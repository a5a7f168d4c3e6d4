"""Measure the memory that the values of a program take while it runs."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rankless.ownership.partitioned_tensor import get_local


class PeakMemoryMode(TorchDispatchMode):
    """Within the context, counts the bytes of all memory that operators allocate and that is still in use.

    What an operator allocates and frees again within itself is not seen.

    Args:
        existing: Tensors that exist before, whose memory does not count.

    Example:
        with PeakMemoryMode([x]) as meter:
            x.exp().sum()
        meter.peak_bytes
    """

    def __init__(self, existing: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch declares no types here
        self.peak_bytes = 0
        """The most bytes in use at any time."""
        self._bytes = 0
        self._known: set[int] = set()
        self._existing = [storage for item in existing if (storage := get_storage(item)) is not None]
        self._known.update(map(id, self._existing))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator, and count the memory of its results that is not that of an argument, or of a collective."""
        result = func(*args, **(kwargs or {}))
        if func.namespace != "c10d":
            given = set(map(id, list_storages((args, kwargs))))
            for storage in list_storages(result):
                if id(storage) not in self._known and id(storage) not in given:
                    self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        # PyTorch keeps the Python object of a storage as long as the storage itself lives.
        key, size = id(storage), storage.nbytes()
        self._known.add(key)
        self._bytes += size
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        weakref.finalize(storage, self._remove, key, size).atexit = False

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._bytes -= size


def list_storages(values: Any) -> list[torch.UntypedStorage]:
    """Return the memory of all tensors among some values."""
    found = [get_storage(item) for item in tree_leaves(values) if isinstance(item, Tensor)]
    return [storage for storage in found if storage is not None]


def get_storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the memory of a tensor; None for a sparse one."""
    return tensor.untyped_storage() if tensor.layout is torch.strided else None


def count_tensor_bytes(tensors: Iterable[Any]) -> int:
    """Return the bytes that all tensors among some values take on this worker, each once."""
    found = {id(item): item for item in tensors if isinstance(item, Tensor)}
    return sum(count_local_bytes(item) for item in found.values() if item.layout is torch.strided)


def count_local_bytes(tensor: Tensor) -> int:
    """Return the bytes of memory that a tensor's elements take on this worker."""
    local = get_local(tensor)
    return local.numel() * local.element_size()

"""Measure the memory of all tensors that are made within a block, as it is after each operator."""

import weakref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rankless.deferred_models.deferred_tensor import DeferredTensor
from rankless.ownership.unread_tensor import UnreadTensor

WITHOUT_MEMORY = (DeferredTensor, UnreadTensor)


class LiveMemoryMode(TorchDispatchMode):
    """Counts the bytes of all memory that operators have allocated and that is still in use, after each operator.

    Unlike `PeakMemoryMode` it sees memory that is freed while its tensor lives on, as that of divided tensors is.
    """

    def __init__(self):
        super().__init__()
        self.peak_bytes = 0
        self._storages = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for item in tree_leaves(result):
            is_real = isinstance(item, Tensor) and not isinstance(item, WITHOUT_MEMORY) and not item.is_meta
            if is_real and all(output.alias_info is None for output in func._schema.returns):
                with torch._C.DisableTorchFunctionSubclass():
                    storage = item.untyped_storage()
                self._storages[id(storage)] = weakref.ref(storage)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return result

    @property
    def live_bytes(self):
        """The bytes in use now."""
        found = {key: reference() for key, reference in self._storages.items()}
        self._storages = {key: self._storages[key] for key, storage in found.items() if storage is not None}
        return sum(storage.nbytes() for storage in found.values() if storage is not None)

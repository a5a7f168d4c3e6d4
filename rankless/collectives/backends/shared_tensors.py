"""The tensors that a group has allocated in memory that all its ranks map.

Note [owners]: the caller owns a tensor, and the group only knows it. So a group keeps no memory of tensors that are
gone, and a tensor outlives its group. This rank's tensor has a storage of its own over the mapped memory, so that its
uses can be counted. The memory is unmapped with the last tensor over it.
"""

from collections.abc import Callable, Sequence
from weakref import WeakMethod, WeakValueDictionary

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from rankless.collectives.backends.memory.shared_region import SharedRegion


class SharedTensor:
    """The parts of all ranks of one allocation.

    Args:
        number: The number of the allocation, equal on all ranks.
        parts: The flat tensor of each rank, in mapped memory.
        reserved_bytes: What it takes of each rank's memory.
    """

    def __init__(self, number: int, parts: list[torch.Tensor], reserved_bytes: int) -> None:
        self.number, self.parts, self.reserved_bytes = number, parts, reserved_bytes
        self.on_close: WeakMethod[Callable[[], None]] | None = None


class SharedTensors:
    """The tensors that one group has allocated and that are still used. See note [owners]."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._by_tensor = WeakTensorKeyDictionary()
        self._by_address: WeakValueDictionary[int, SharedTensor] = WeakValueDictionary()
        self.allocations = 0
        """How many there have been, equal on all ranks."""

    @property
    def reserved_bytes(self) -> int:
        """What the tensors that are still used take of this rank's memory."""
        return sum(shared.reserved_bytes for shared in list(self._by_address.values()))

    def add(
        self, region: SharedRegion, count: int, dtype: torch.dtype, on_close: Callable[[], None] | None
    ) -> torch.Tensor:
        """Divide a region between the ranks, each part for `count` values, and return this rank's part."""
        stride = len(region.bytes) // self._size
        with torch.inference_mode(False):
            parts = [part[: count * dtype.itemsize].view(dtype) for part in region.bytes.split(stride)]
            own: torch.Tensor = parts[self._rank]
            if count:
                own = torch.frombuffer(region.memory, dtype=dtype, count=count, offset=stride * self._rank)
        shared = SharedTensor(self.allocations, parts, stride)
        if on_close is not None:
            shared.on_close = WeakMethod(on_close)
        self._by_tensor[own] = shared
        if count:
            self._by_address[own.data_ptr()] = shared
        return own

    def find(self, tensor: torch.Tensor) -> SharedTensor | None:
        """Return the allocation of which a flat tensor has the first values of this rank's part, or all of them."""
        shared = self._by_address.get(tensor.data_ptr())
        if shared is None or len(tensor) > len(shared.parts[0]) or tensor.dtype != shared.parts[0].dtype:
            return None
        return shared

    def find_parts(self, tensors: Sequence[torch.Tensor]) -> SharedTensor | None:
        """Return the allocation of which flat tensors are equal parts of this rank's part, one after the other."""
        first = tensors[0]
        shared = self.find(first) if len(first) else None
        if shared is None or len(first) * len(tensors) > len(shared.parts[0]):
            return None
        places = range(first.data_ptr(), first.data_ptr() + first.nbytes * len(tensors), first.nbytes)
        are_parts = all(
            len(tensor) == len(first) and tensor.data_ptr() == place
            for tensor, place in zip(tensors, places, strict=True)
        )
        return shared if are_parts else None

    def close(self) -> None:
        """Forget all tensors, and tell their owners."""
        for shared in list(self._by_address.values()):
            released = shared.on_close() if shared.on_close is not None else None
            if released is not None:
                released()
        self._by_tensor.clear()
        self._by_address.clear()

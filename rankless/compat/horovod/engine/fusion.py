"""The memory in which tensors that are executed as one stand side by side."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

Activity = Callable[[Sequence[str], str], AbstractContextManager[None]]
"""What the timeline is told: keys, and what is done to them."""


class FusionBuffer:
    """Kept from batch to batch on the CPU, and grown; on a GPU torch's own allocator keeps it, by stream."""

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        self._memory = torch.empty(0, dtype=torch.uint8)

    def fill(self, keys: Sequence[str], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """All values of the tensors, which are of one type and device, in one row; it is good until the next call."""
        buffer = self._row(keys, sum(tensor.numel() for tensor in tensors), tensors[0])
        with self._activity(keys, "MEMCPY_IN_FUSION_BUFFER"):
            torch.cat([tensor.detach().reshape(-1) for tensor in tensors], out=buffer)
        return buffer

    def empty(self, keys: Sequence[str], buffer: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Give the tensors the values of the row."""
        with self._activity(keys, "MEMCPY_OUT_FUSION_BUFFER"):
            pieces = buffer.split([tensor.numel() for tensor in tensors])
            torch._foreach_copy_([tensor.detach().reshape(-1) for tensor in tensors], list(pieces))

    def _row(self, keys: Sequence[str], count: int, like: torch.Tensor) -> torch.Tensor:
        size = count * like.element_size()
        if like.device.type != "cpu":
            with self._activity(keys, "INIT_FUSION_BUFFER"):
                return torch.empty(count, dtype=like.dtype, device=like.device)
        if size > len(self._memory):
            with self._activity(keys, "INIT_FUSION_BUFFER"):
                self._memory = torch.empty(size, dtype=torch.uint8)
        return self._memory[:size].view(like.dtype)

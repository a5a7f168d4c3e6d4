"""The buffer that holds fused tensors side by side."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

Activity = Callable[[Sequence[str], str], AbstractContextManager[None]]
"""Records an activity in the timeline, from the keys of the operations and the activity's name."""


class FusionBuffer:
    """On the CPU, one buffer that grows and is reused by every batch. On a GPU, torch's allocator reuses memory."""

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def pack(self, keys: Sequence[str], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the tensors' values in one flat tensor, valid until the next call.

        The tensors have the same dtype and device.
        """
        buffer = self._get_buffer(keys, sum(tensor.numel() for tensor in tensors), tensors[0])
        with self._activity(keys, "MEMCPY_IN_FUSION_BUFFER"):
            torch.cat([tensor.detach().reshape(-1) for tensor in tensors], out=buffer)
        return buffer

    def unpack(self, keys: Sequence[str], buffer: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the values of the flat tensor into the tensors."""
        with self._activity(keys, "MEMCPY_OUT_FUSION_BUFFER"):
            pieces = buffer.split([tensor.numel() for tensor in tensors])
            torch._foreach_copy_([tensor.detach().reshape(-1) for tensor in tensors], list(pieces))

    def _get_buffer(self, keys: Sequence[str], count: int, like: torch.Tensor) -> torch.Tensor:
        size = count * like.element_size()
        if like.device.type != "cpu":
            with self._activity(keys, "INIT_FUSION_BUFFER"):
                return torch.empty(count, dtype=like.dtype, device=like.device)
        if size > len(self._memory):
            with self._activity(keys, "INIT_FUSION_BUFFER"):
                self._memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self._memory[:size].view(like.dtype)

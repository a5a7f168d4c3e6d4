"""Copies of tensors as they are at one moment."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor


class Snapshot:
    """Tensors copied to the CPU, contiguous.

    # Note [reused memory]: touching fresh memory costs several times as much as copying. So the next snapshot copies
    # into the memory of this one.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors as they are now, and drop all others."""
        held, self.tensors = self.tensors, {}
        copied = [(name, tensor, held.pop(name, None)) for name, tensor in tensors.items()]
        del held  # free what is not needed before more memory is allocated
        # Memory made in inference mode could not be copied into outside of it.
        with torch.inference_mode(False), torch.no_grad():
            for name, tensor, memory in copied:
                if memory is None or memory.shape != tensor.shape or memory.dtype != tensor.dtype:
                    # A GPU can copy to page-locked memory without a stop at every tensor.
                    memory = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
                self.tensors[name] = memory.copy_(tensor, non_blocking=True)
        for device in devices_of(tensors.values()):
            torch.cuda.synchronize(device)


def devices_of(tensors: Iterable[Tensor]) -> Sequence[torch.device]:
    """Return the GPUs that hold tensors."""
    return sorted({tensor.device for tensor in tensors if tensor.is_cuda}, key=str)

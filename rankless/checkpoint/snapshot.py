"""Copies of tensors as they are at one moment, and the assignment of tensors to ranks that write."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor


def assign_tensors(tensors: Mapping[str, Tensor], *, ranks: int) -> list[list[str]]:
    """Return the names of the tensors that each rank writes: about as many bytes each, equal on every rank."""
    shares: list[list[str]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].nbytes, item[0])):
        rank = loads.index(min(loads))
        shares[rank].append(name)
        # An empty tensor has an entry in the file's header too.
        loads[rank] += max(1, tensor.nbytes)
    return shares


class Snapshot:
    """Tensors copied to the CPU: contiguous and without shared memory, as safetensors demands.

    # Note [reused memory]: touching fresh memory costs several times as much as copying. So with `reuse_memory` the
    # next snapshot copies into the memory of this one.
    """

    def __init__(self, *, reuse_memory: bool) -> None:
        self._reuse_memory = reuse_memory
        self.tensors: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor], names: Iterable[str]) -> None:
        """Copy those tensors as they are now, and drop all others."""
        held, self.tensors = self.tensors, {}
        copied = [(name, tensors[name], held.pop(name, None)) for name in names]
        del held  # free what is not needed before more memory is allocated
        # Memory made in inference mode could not be copied into outside of it.
        with torch.inference_mode(False), torch.no_grad():
            for name, tensor, memory in copied:
                if memory is None or memory.shape != tensor.shape or memory.dtype != tensor.dtype:
                    # A GPU can copy to page-locked memory without a stop at every tensor.
                    pinned = tensor.is_cuda and self._reuse_memory
                    memory = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
                self.tensors[name] = memory.copy_(tensor, non_blocking=True)
        for device in devices_of(tensors.values()):
            torch.cuda.synchronize(device)


def devices_of(tensors: Iterable[Tensor]) -> Sequence[torch.device]:
    """Return the GPUs that hold tensors."""
    return sorted({tensor.device for tensor in tensors if tensor.is_cuda}, key=str)

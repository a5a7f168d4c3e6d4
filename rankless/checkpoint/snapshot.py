"""Copies of tensors as they are at one moment, and which rank writes which."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor


def assign_tensors(tensors: Mapping[str, Tensor], *, ranks: int) -> list[list[str]]:
    """The names of the tensors that each rank writes: about as many bytes each, the same answer on every rank."""
    shares: list[list[str]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].nbytes, item[0])):
        rank = loads.index(min(loads))
        shares[rank].append(name)
        # An empty tensor has its line in the file's header, too.
        loads[rank] += max(1, tensor.nbytes)
    return shares


class Snapshot:
    """Tensors copied to the CPU: contiguous, sharing no memory, as safetensors demands. `kept`: for many copies.

    # Note [kept memory]: touching fresh memory costs several times what copying costs. So a snapshot for a
    # background save is kept and copied into again at the next one.
    """

    def __init__(self, *, reuse_memory: bool) -> None:
        self._reuse_memory = reuse_memory
        self.tensors: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor], names: Iterable[str]) -> None:
        """Hold what those tensors are now, and nothing else."""
        held, self.tensors = self.tensors, {}
        copied = [(name, tensors[name], held.pop(name, None)) for name in names]
        del held  # what is not wanted any more goes before more memory is asked for
        # Memory made in inference mode could not be copied into outside of it.
        with torch.inference_mode(False), torch.no_grad():
            for name, tensor, memory in copied:
                if memory is None or memory.shape != tensor.shape or memory.dtype != tensor.dtype:
                    # Page-locked memory is what a GPU can copy to without a halt at every tensor.
                    pinned = tensor.is_cuda and self._reuse_memory
                    memory = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
                self.tensors[name] = memory.copy_(tensor, non_blocking=True)
        for device in devices_of(tensors.values()):
            torch.cuda.synchronize(device)


def devices_of(tensors: Iterable[Tensor]) -> Sequence[torch.device]:
    """The GPUs on which tensors lie."""
    return sorted({tensor.device for tensor in tensors if tensor.is_cuda}, key=str)

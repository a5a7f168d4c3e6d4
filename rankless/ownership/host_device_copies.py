"""Copies between a device and the memory of its host, where shards of states lie that are offloaded.

Note [offloaded shards]: a job with `offload=True` keeps its shards of parameters, gradients and optimizer state in the
memory of the host, and the optimizer steps there. Collectives and programs run on the device: a shard is copied to the
device just before it is gathered, and a gradient to the host after it is summed. This is ZeRO-Offload (Ren et al.,
USENIX ATC 2021). Memory of the host is locked (pinned), so that the device copies it without help of the processor. On
the CPU nothing is copied.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

HOST = torch.device("cpu")


def copy_to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors in the memory of the host, with the same strides, once their elements are there.

    Args:
        tensors: Of any dtype and device. Those on the CPU are returned as they are.
    """
    is_pinned = torch.accelerator.is_available()
    copied = [tensor if tensor.device == HOST else make_host_copy(tensor, is_pinned=is_pinned) for tensor in tensors]
    for device in {tensor.device for tensor in tensors} - {HOST}:
        if is_pinned:
            torch.accelerator.current_stream(device).synchronize()
    return copied


def make_host_copy(tensor: Tensor, *, is_pinned: bool) -> Tensor:
    """Begin to copy a tensor to the host; without pinned memory it is there at once."""
    memory = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=HOST, pin_memory=is_pinned)
    return memory.copy_(tensor, non_blocking=is_pinned)


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, with the same strides; the tensor itself if it is there already."""
    if tensor.device == device:
        return tensor
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    return made.copy_(tensor, non_blocking=True)

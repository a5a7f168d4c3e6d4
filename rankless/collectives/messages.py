"""Messages between two ranks of a process group, from memory that its backend can send.

Gloo writes memory of the host to a socket. A tensor on a GPU, of workers that share it, is copied there and back.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from rankless.collectives.checked_collectives import CombinedWork, PendingWork


def start_send(tensor: Tensor, *, group: dist.ProcessGroup, target: int, tag: int = 0) -> PendingWork:
    """Begin to send a contiguous tensor to a rank of a group. The caller keeps it as it is until the work is done."""
    if not is_copied(tensor, group):
        return _require(dist.isend(tensor, group=group, tag=tag, group_dst=target))
    data = tensor.detach().cpu()
    work = _require(dist.isend(data, group=group, tag=tag, group_dst=target))
    return CombinedWork([work], data.numel)  # which keeps the data


def start_receive(tensor: Tensor, *, group: dist.ProcessGroup, source: int, tag: int = 0) -> PendingWork:
    """Begin to receive a contiguous tensor from a rank of a group."""
    if not is_copied(tensor, group):
        return _require(dist.irecv(tensor, group=group, tag=tag, group_src=source))
    data = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    work = _require(dist.irecv(data, group=group, tag=tag, group_src=source))
    return CombinedWork([work], lambda: tensor.detach().copy_(data))


def is_copied(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Return whether messages of a tensor go through a copy in memory of the host."""
    return tensor.device.type != "cpu" and group._get_backend(tensor.device).name() == "gloo"


def _require(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this process is not in the group"
    return work

"""A process group of torch's own kinds, Gloo or NCCL, that belongs to one process set and to nobody else."""

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rankless.compat.horovod.engine.requests import Reduction

REDUCE: dict[Reduction, Any] = {
    Reduction.AVERAGE: dist.ReduceOp.SUM,
    Reduction.SUM: dist.ReduceOp.SUM,
    Reduction.MIN: dist.ReduceOp.MIN,
    Reduction.MAX: dist.ReduceOp.MAX,
    Reduction.PRODUCT: dist.ReduceOp.PRODUCT,
}
STAND_IN = {torch.int16: torch.int32, torch.bool: torch.int32}
"""What is reduced in the place of types that Gloo does not know."""


class GroupPlane:
    """The collectives of one process set on one kind of device. All tensors are contiguous."""

    def __init__(self, group: Any, *, place: int, size: int) -> None:
        self._group = group
        self._place = place
        self._size = size

    def allreduce(self, tensor: torch.Tensor, reduction: Reduction) -> None:
        """Combine in place."""
        options = dist.AllreduceOptions()
        options.reduceOp = REDUCE[reduction]
        if tensor.dtype in STAND_IN:
            wider = tensor.to(STAND_IN[tensor.dtype])
            self._group.allreduce([wider], options).wait()
            tensor.copy_(wider)
        elif tensor.numel():
            self._group.allreduce([tensor], options).wait()

    def allgather(self, tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """The tensors of all, one below the other; the ranks' have so many rows each."""
        shape = tensor.shape[1:]
        longest = max(rows)
        width = _row_bytes(tensor)
        if not width or not longest:
            return tensor.new_empty((sum(rows), *shape))
        given = tensor.new_zeros(longest * width, dtype=torch.uint8)
        given[: rows[self._place] * width] = _as_bytes(tensor)
        taken = given.new_empty(self._size * longest * width)
        self._group._allgather_base(taken, given).wait()
        pieces = [taken[place * longest * width :][: count * width] for place, count in enumerate(rows)]
        return torch.cat(pieces).view(tensor.dtype).reshape(sum(rows), *shape)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Write the values of the rank at a place into everybody's tensor."""
        if not tensor.numel():
            return
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        self._group.broadcast([_as_bytes(tensor)], options).wait()

    def alltoall(self, tensor: torch.Tensor, given: Sequence[int], taken: Sequence[int]) -> torch.Tensor:
        """Rows from everybody, in their order; so many rows are given to, and taken from, each."""
        width = _row_bytes(tensor)
        output = tensor.new_empty((sum(taken), *tensor.shape[1:]))
        if width:
            gives, takes = [count * width for count in given], [count * width for count in taken]
            self._group.alltoall_base(_as_bytes(output), _as_bytes(tensor), takes, gives).wait()
        return output

    def close(self) -> None:
        """Let go of it; who waits in it gets an error."""
        with suppress(Exception):
            self._group.abort()


def open_group(store: Any, *, place: int, size: int, device: torch.device, timeout: timedelta) -> GroupPlane:
    """A new group of the ranks that open it at the same store."""
    kind: Any = dist.ProcessGroupNCCL if device.type == "cuda" else dist.ProcessGroupGloo
    return GroupPlane(kind(store, place, size, timeout), place=place, size=size)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _row_bytes(tensor: torch.Tensor) -> int:
    count = 1
    for size in tensor.shape[1:]:
        count *= size
    return count * tensor.element_size()

"""A torch process group, Gloo or NCCL, that only one process set uses."""

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rankless.extensions.horovod.engine.requests import ReduceOpCode

REDUCE_OPS: dict[ReduceOpCode, Any] = {
    ReduceOpCode.AVERAGE: dist.ReduceOp.SUM,
    ReduceOpCode.SUM: dist.ReduceOp.SUM,
    ReduceOpCode.MIN: dist.ReduceOp.MIN,
    ReduceOpCode.MAX: dist.ReduceOp.MAX,
    ReduceOpCode.PRODUCT: dist.ReduceOp.PRODUCT,
}
WIDER_DTYPES = {torch.int16: torch.int32, torch.bool: torch.int32}
"""The dtypes in which values are reduced whose own dtype Gloo does not support."""


class ProcessGroupBackend:
    """The collectives of one process set on one kind of device. All tensors are contiguous.

    Args:
        group: torch's group.
        name: The backend's name in a timeline.
        index: The index of this rank in the process set.
        size: The number of ranks.
    """

    def __init__(self, group: Any, *, name: str, index: int, size: int) -> None:
        self.name = name
        self._group = group
        self._index = index
        self._size = size

    def allreduce(self, tensor: torch.Tensor, reduction: ReduceOpCode) -> None:
        """Combine the tensor in place."""
        options = dist.AllreduceOptions()
        options.reduceOp = REDUCE_OPS[reduction]
        if tensor.dtype in WIDER_DTYPES:
            wider = tensor.to(WIDER_DTYPES[tensor.dtype])
            self._group.allreduce([wider], options).wait()
            tensor.copy_(wider)
        elif tensor.numel():
            self._group.allreduce([tensor], options).wait()

    def allgather(self, tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Return the tensors of all ranks, concatenated. `rows[i]` is the number of rows of the rank at index i."""
        shape = tensor.shape[1:]
        longest = max(rows)
        width = _count_row_bytes(tensor)
        if not width or not longest:
            return tensor.new_empty((sum(rows), *shape))
        sent = tensor.new_zeros(longest * width, dtype=torch.uint8)
        sent[: rows[self._index] * width] = _view_bytes(tensor)
        received = sent.new_empty(self._size * longest * width)
        self._group._allgather_base(received, sent).wait()
        pieces = [received[index * longest * width :][: count * width] for index, count in enumerate(rows)]
        return torch.cat(pieces).view(tensor.dtype).reshape(sum(rows), *shape)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy the values of the rank at index `root` into every rank's tensor."""
        if not tensor.numel():
            return
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        self._group.broadcast([_view_bytes(tensor)], options).wait()

    def alltoall(self, tensor: torch.Tensor, sent_rows: Sequence[int], received_rows: Sequence[int]) -> torch.Tensor:
        """Return the rows from all ranks, in their order. The arguments are the row counts for and from each rank."""
        width = _count_row_bytes(tensor)
        output = tensor.new_empty((sum(received_rows), *tensor.shape[1:]))
        if width:
            sent_bytes = [count * width for count in sent_rows]
            received_bytes = [count * width for count in received_rows]
            self._group.alltoall_base(_view_bytes(output), _view_bytes(tensor), received_bytes, sent_bytes).wait()
        return output

    def close(self, *, is_stuck: bool = False) -> None:
        """End the waits of a thread that is stuck. It gets an error, and the peers may, too."""
        if is_stuck:
            with suppress(Exception):
                self._group.abort()


def open_process_group(
    store: Any, *, index: int, size: int, device: torch.device, timeout: timedelta
) -> ProcessGroupBackend:
    """Return a new group of the ranks that open it at the same store: NCCL if each has a GPU of its own, else Gloo."""
    is_nccl = device.type == "cuda" and _has_gpu_of_its_own(store, index, size, device)
    group_class: Any = dist.ProcessGroupNCCL if is_nccl else dist.ProcessGroupGloo
    group = group_class(store, index, size, timeout)
    return ProcessGroupBackend(group, name="NCCL" if is_nccl else "GLOO", index=index, size=size)


def _has_gpu_of_its_own(store: Any, index: int, size: int, device: torch.device) -> bool:
    """Return whether no two ranks use one GPU, which NCCL refuses. All ranks call this."""
    store.set(f"gpu/{index}", str(torch.cuda.get_device_properties(device).uuid))
    return len({bytes(store.get(f"gpu/{rank}")) for rank in range(size)}) == size


def _view_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _count_row_bytes(tensor: torch.Tensor) -> int:
    count = 1
    for size in tensor.shape[1:]:
        count *= size
    return count * tensor.element_size()

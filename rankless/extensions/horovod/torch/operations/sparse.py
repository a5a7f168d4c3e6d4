"""Allreduce of sparse tensors, by gathering their indices and values."""

from collections.abc import Callable

import torch

from rankless.extensions.horovod.common.process_sets import ProcessSet, global_process_set
from rankless.extensions.horovod.engine.requests import ReduceOpCode
from rankless.extensions.horovod.torch.operations.allgather import allgather_async
from rankless.extensions.horovod.torch.operations.handles import synchronize


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start a sparse allreduce, and return a handle to call: it returns the sparse result.

    The call consists of two allgathers, named `name.indices` and `name.values`.

    Args:
        tensor: A sparse COO tensor.
        name: The name of the operation.
        op: Sum or Average.
        process_set: The ranks that take part. Default all.
    """
    # An allgather concatenates along the first dimension, so each index becomes one row.
    index_rows = tensor._indices().transpose(0, 1).contiguous()
    indices_handle = allgather_async(index_rows, f"{name}.indices", process_set)
    values_handle = allgather_async(tensor._values().contiguous(), f"{name}.values", process_set)

    def get_result() -> torch.Tensor:
        values = synchronize(values_handle)
        indices = synchronize(indices_handle)
        if op == ReduceOpCode.AVERAGE:
            values = values / process_set.size()
        return torch.sparse_coo_tensor(indices.transpose(0, 1), values, tensor.size(), check_invariants=False)

    return get_result

"""Allgather: concatenates tensors along the first dimension, which may differ from rank to rank.

An allreduce of sparse tensors gathers their indices and values.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from rankless.extensions.horovod.common.process_sets import ProcessSet, global_process_set
from rankless.extensions.horovod.engine.requests import OperationKind, ReduceOpCode
from rankless.extensions.horovod.torch.operations.allreduce import Allreduce, GroupedAllreduce
from rankless.extensions.horovod.torch.operations.checks import require_tensors, validate_tensor
from rankless.extensions.horovod.torch.operations.handles import apply_function, submit, submit_group, synchronize
from rankless.extensions.horovod.torch.operations.reduction_rule import make_reduction_rule


@require_tensors
def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return all ranks' tensors, concatenated in rank order. The call is differentiable.

    Backward averages the gradient over the ranks, and each rank takes its own rows.

    Args:
        tensor: A tensor of at least 1 dimension. Ranks may differ in the first dimension only.
        name: The name of the operation. Default a counter.
        process_set: The ranks that take part. Default all.

    Raises:
        IndexError: The tensor has 0 dimensions.
        HorovodInternalError: The ranks' tensors do not match, or a rank is gone.
    """
    result: torch.Tensor = apply_function(Allgather, tensor, name, process_set)
    return result


@require_tensors
def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start an allgather. `synchronize(handle)` returns all ranks' tensors, concatenated in rank order."""
    return submit(OperationKind.ALLGATHER, name, process_set, partial(_make_fields, tensor))


@require_tensors
def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Do one allgather for each tensor, all of them together. The call is differentiable."""
    return list(apply_function(GroupedAllgather, name, process_set, *tensors))


@require_tensors
def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a grouped allgather. `synchronize(handle)` returns a list with one result for each tensor."""
    return submit_group(
        OperationKind.ALLGATHER, name, process_set, [partial(_make_fields, tensor) for tensor in tensors]
    )


def _make_fields(tensor: torch.Tensor) -> dict[str, Any]:
    if tensor.dim() == 0:
        raise IndexError(
            f"\nexpected: a tensor with a first dimension, along which allgather concatenates\n"
            f"found:    a tensor of 0 dimensions and type {tensor.type()}\n"
            "fix:      tensor.reshape(1) has one; hvd.allgather_object gathers plain numbers"
        )
    return {"tensor": validate_tensor(tensor)}


class Allgather(torch.autograd.Function):
    """An allgather. Backward averages the gradient over the ranks, and takes this rank's rows."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> torch.Tensor:
        """Return all ranks' tensors, concatenated."""
        result: torch.Tensor = synchronize(allgather_async(tensor, name, process_set))
        ctx.rows, ctx.process_set = tensor.shape[0], process_set
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return the averaged gradient of this rank's rows."""
        rule = make_reduction_rule(ReduceOpCode.AVERAGE, 1.0, 1.0, ctx.process_set)
        averaged = apply_function(Allreduce, gradient.contiguous(), None, rule)
        (offset,) = _compute_row_offsets([ctx.rows], ctx.process_set)
        return averaged.narrow(0, offset, ctx.rows), None, None


class GroupedAllgather(torch.autograd.Function):
    """A grouped allgather. Backward averages the gradients, and takes this rank's rows of each."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return, for each tensor, all ranks' tensors, concatenated."""
        results = synchronize(grouped_allgather_async(tensors, name, process_set))
        ctx.rows, ctx.process_set = [tensor.shape[0] for tensor in tensors], process_set
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the averaged gradients of this rank's rows."""
        rule = make_reduction_rule(ReduceOpCode.AVERAGE, 1.0, 1.0, ctx.process_set)
        averaged = apply_function(GroupedAllreduce, None, rule, *(gradient.contiguous() for gradient in gradients))
        offsets = _compute_row_offsets(ctx.rows, ctx.process_set)
        parts = zip(averaged, offsets, ctx.rows, strict=True)
        return (None, None, *(whole.narrow(0, offset, rows) for whole, offset, rows in parts))


def _compute_row_offsets(rows: list[int], process_set: ProcessSet) -> list[int]:
    """Return the index of this rank's first row in each of the concatenated tensors."""
    counts = synchronize(allgather_async(torch.tensor([rows], device="cpu"), None, process_set))
    offsets: list[int] = counts[: process_set.rank()].sum(0).tolist()
    return offsets


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

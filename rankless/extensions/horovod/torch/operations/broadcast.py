"""Broadcast: copies one rank's values to all ranks."""

from typing import Any

import torch

from rankless.extensions.horovod import context
from rankless.extensions.horovod.common.process_sets import ProcessSet, global_process_set
from rankless.extensions.horovod.engine.requests import OperationKind, ReduceOpCode
from rankless.extensions.horovod.torch.operations.allreduce import Allreduce
from rankless.extensions.horovod.torch.operations.checks import require_tensors, validate_root_rank, validate_tensor
from rankless.extensions.horovod.torch.operations.handles import apply_function, submit, synchronize
from rankless.extensions.horovod.torch.operations.reduction_rule import make_reduction_rule


@require_tensors
def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return a new tensor with the root's values. The call is differentiable.

    Backward averages the gradient over the ranks for the root. The gradient on other ranks is zero.

    Args:
        tensor: A contiguous tensor of the same shape and dtype on all ranks.
        root_rank: The root's rank, counted over the whole job.
        name: The name of the operation. Default a counter.
        process_set: The ranks that take part. Default all.

    Raises:
        ValueError: The root is not in the process set, or the tensor is not supported.
        HorovodInternalError: The ranks' tensors do not match, or a rank is gone.
    """
    result: torch.Tensor = apply_function(Broadcast, tensor, root_rank, name, process_set)
    return result


@require_tensors
def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a broadcast. `synchronize(handle)` returns a new tensor with the root's values."""
    return _start(tensor, torch.empty_like(tensor), root_rank, name, process_set)


@require_tensors
def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Copy the root's values into the tensor, and return it."""
    synchronize(_start(tensor, tensor, root_rank, name, process_set))
    return tensor


@require_tensors
def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a broadcast in place. After `synchronize(handle)` the tensor contains the root's values."""
    return _start(tensor, tensor, root_rank, name, process_set)


def _start(
    tensor: torch.Tensor, output: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
) -> int:
    def make_fields() -> dict[str, Any]:
        values = validate_tensor(tensor)
        root = validate_root_rank(process_set, root_rank)
        return {"tensor": values, "output": values if output is tensor else output, "root": root}

    return submit(OperationKind.BROADCAST, name, process_set, make_fields)


class Broadcast(torch.autograd.Function):
    """A broadcast. Backward averages the gradient, and only the root keeps it."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        """Return the root's values in a new tensor."""
        ctx.root_rank, ctx.process_set = root_rank, process_set
        result: torch.Tensor = synchronize(broadcast_async(tensor, root_rank, name, process_set))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Return the averaged gradient on the root, and zeros on other ranks."""
        rule = make_reduction_rule(ReduceOpCode.AVERAGE, 1.0, 1.0, ctx.process_set)
        averaged = apply_function(Allreduce, gradient.contiguous(), None, rule)
        if context.current().world.rank != ctx.root_rank:
            averaged = torch.zeros_like(averaged)
        return averaged, None, None, None

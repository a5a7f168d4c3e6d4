"""One rank's values, on all."""

from typing import Any

import torch

from rankless.compat.horovod import context
from rankless.compat.horovod.common.process_sets import ProcessSet, global_process_set
from rankless.compat.horovod.engine.requests import OperationKind, Reduction
from rankless.compat.horovod.torch.operations.allreduce import Allreduce
from rankless.compat.horovod.torch.operations.checks import require_tensors, validate_root_rank, validate_tensor
from rankless.compat.horovod.torch.operations.differentiable import apply_function
from rankless.compat.horovod.torch.operations.handles import submit, synchronize
from rankless.compat.horovod.torch.operations.reductions import make_reduction_rule


@require_tensors
def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """A new tensor with the root's values; gradients flow through. `root_rank` counts over the whole job.

    Its gradient is averaged over the ranks on the root, and zero elsewhere.
    """
    result: torch.Tensor = apply_function(Broadcast, tensor, root_rank, name, process_set)
    return result


@require_tensors
def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """A handle: `synchronize` gives a new tensor with the root's values."""
    return _start(tensor, torch.empty_like(tensor), root_rank, name, process_set)


@require_tensors
def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The tensor itself, which now holds the root's values."""
    synchronize(_start(tensor, tensor, root_rank, name, process_set))
    return tensor


@require_tensors
def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """A handle: after `synchronize` the tensor holds the root's values."""
    return _start(tensor, tensor, root_rank, name, process_set)


def _start(
    tensor: torch.Tensor, output: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
) -> int:
    values = validate_tensor(tensor)
    target = values if output is tensor else output
    root = validate_root_rank(process_set, root_rank)
    return submit(OperationKind.BROADCAST, name, process_set, tensor=values, output=target, root=root)


class Broadcast(torch.autograd.Function):
    """A broadcast; backward averages the gradient, and only the root keeps it."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        """The root's values, in a new tensor."""
        ctx.root_rank, ctx.process_set = root_rank, process_set
        result: torch.Tensor = synchronize(broadcast_async(tensor, root_rank, name, process_set))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """The averaged gradient on the root, zeros elsewhere."""
        rule = make_reduction_rule(Reduction.AVERAGE, 1.0, 1.0, ctx.process_set)
        averaged = apply_function(Allreduce, gradient.contiguous(), None, rule)
        if context.current().world.rank != ctx.root_rank:
            averaged = torch.zeros_like(averaged)
        return averaged, None, None, None

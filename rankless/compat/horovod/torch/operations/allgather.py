"""Tensors joined along their first dimension, which may differ from rank to rank."""

from collections.abc import Sequence
from typing import Any

import torch

from rankless.compat.horovod.common.process_sets import ProcessSet, global_process_set
from rankless.compat.horovod.engine.requests import Kind, Reduction
from rankless.compat.horovod.torch.operations.allreduce import Allreduce, GroupedAllreduce
from rankless.compat.horovod.torch.operations.checks import sendable, takes_tensors
from rankless.compat.horovod.torch.operations.differentiable import applied
from rankless.compat.horovod.torch.operations.handles import submit, submit_group, synchronize
from rankless.compat.horovod.torch.operations.reductions import combining


@takes_tensors
def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """All ranks' tensors, joined in the order of ranks; gradients flow through.

    Its gradient is averaged over the ranks, then each rank takes its own rows. Raises IndexError for a tensor of 0
    dimensions.
    """
    result: torch.Tensor = applied(Allgather, tensor, name, process_set)
    return result


@takes_tensors
def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """A handle: `synchronize` gives all ranks' tensors, joined in the order of ranks."""
    return submit(Kind.ALLGATHER, name, process_set, tensor=sendable(tensor))


@takes_tensors
def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """For each tensor, all ranks' joined in the order of ranks, all at once; gradients flow through."""
    return list(applied(GroupedAllgather, name, process_set, *tensors))


@takes_tensors
def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """A handle: `synchronize` gives, for each tensor, all ranks' joined in the order of ranks."""
    return submit_group(Kind.ALLGATHER, name, process_set, [{"tensor": sendable(tensor)} for tensor in tensors])


class Allgather(torch.autograd.Function):
    """An allgather; backward averages the gradient over the ranks and takes this rank's rows."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> torch.Tensor:
        """All ranks' tensors, joined."""
        ctx.rows, ctx.process_set = tensor.shape[0], process_set
        result: torch.Tensor = synchronize(allgather_async(tensor, name, process_set))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """The averaged gradient of this rank's rows."""
        rule = combining(Reduction.AVERAGE, 1.0, 1.0, ctx.process_set)
        averaged = applied(Allreduce, gradient.contiguous(), None, rule)
        (start,) = _starts([ctx.rows], ctx.process_set)
        return averaged.narrow(0, start, ctx.rows), None, None


class GroupedAllgather(torch.autograd.Function):
    """A grouped allgather; backward averages the gradients and takes this rank's rows of each."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """For each tensor, all ranks' joined."""
        ctx.rows, ctx.process_set = [tensor.shape[0] for tensor in tensors], process_set
        return tuple(synchronize(grouped_allgather_async(tensors, name, process_set)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The averaged gradients of this rank's rows."""
        rule = combining(Reduction.AVERAGE, 1.0, 1.0, ctx.process_set)
        averaged = applied(GroupedAllreduce, None, rule, *(gradient.contiguous() for gradient in gradients))
        starts = _starts(ctx.rows, ctx.process_set)
        parts = zip(averaged, starts, ctx.rows, strict=True)
        return (None, None, *(whole.narrow(0, start, rows) for whole, start, rows in parts))


def _starts(rows: list[int], process_set: ProcessSet) -> list[int]:
    """Where this rank's rows begin in each of the joined tensors."""
    counts = synchronize(allgather_async(torch.tensor([rows]), None, process_set))
    starts: list[int] = counts[: process_set.rank()].sum(0).tolist()
    return starts

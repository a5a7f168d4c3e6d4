"""Every rank gives some rows to every rank."""

from collections.abc import Sequence
from typing import Any

import torch

from rankless.compat.horovod.common.process_sets import ProcessSet, global_process_set
from rankless.compat.horovod.engine.requests import OperationKind
from rankless.compat.horovod.torch.operations.checks import require_tensors, resolve_splits, validate_tensor
from rankless.compat.horovod.torch.operations.differentiable import apply_function
from rankless.compat.horovod.torch.operations.handles import submit, synchronize

Splits = torch.Tensor | Sequence[int]


@require_tensors
def alltoall(
    tensor: torch.Tensor,
    splits: Splits | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The rows that this rank gets, in the order of senders; gradients flow back to where the rows came from.

    `splits` says how many rows go to each rank: 32-bit integers; evenly if left away. If given, how many came from each
    rank is returned too.
    """
    output, received = apply_function(Alltoall, tensor, splits, name, process_set)
    return output if splits is None else (output, _match_device(splits, received))


@require_tensors
def alltoall_async(
    tensor: torch.Tensor,
    splits: Splits | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """A handle: `synchronize` gives the rows that this rank gets, and how many came from each rank."""
    counts = resolve_splits(tensor, splits, process_set.size() or 1)
    rows = validate_tensor(tensor).narrow(0, 0, sum(counts))
    return submit(OperationKind.ALLTOALL, name, process_set, tensor=rows, splits=counts)


def _match_device(splits: Splits, received: torch.Tensor) -> torch.Tensor:
    return received.to(splits.device) if isinstance(splits, torch.Tensor) else received


class Alltoall(torch.autograd.Function):
    """An alltoall; backward sends each row's gradient to the rank that the row came from."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: Splits | None, name: str | None, process_set: ProcessSet
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows that came, and how many from each rank."""
        output, received = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.rows, ctx.received, ctx.process_set = tensor.shape[0], received, process_set
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor, None, None, None]:
        """The gradients of this rank's rows, from wherever they went; zero for rows that went nowhere."""
        sent, _ = apply_function(Alltoall, gradient.contiguous(), ctx.received, None, ctx.process_set)
        kept = ctx.rows - sent.shape[0]
        if kept:
            sent = torch.cat([sent, sent.new_zeros(kept, *sent.shape[1:])])
        return sent, None, None, None

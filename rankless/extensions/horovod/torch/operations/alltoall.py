"""Alltoall: every rank sends some rows to every rank."""

from collections.abc import Sequence
from typing import Any

import torch

from rankless.extensions.horovod.common.process_sets import ProcessSet, global_process_set
from rankless.extensions.horovod.engine.requests import OperationKind
from rankless.extensions.horovod.torch.operations.checks import require_tensors, resolve_splits, validate_tensor
from rankless.extensions.horovod.torch.operations.handles import apply_function, submit, synchronize

Splits = torch.Tensor | Sequence[int]


@require_tensors
def alltoall(
    tensor: torch.Tensor,
    splits: Splits | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the rows that this rank receives, in rank order of the senders. The call is differentiable.

    Backward sends the gradient of each row to the rank that the row came from.

    Args:
        tensor: A tensor of at least 1 dimension. Ranks may differ in the first dimension only.
        splits: The number of rows for each rank, as 32-bit integers. Default an even division.
        name: The name of the operation. Default a counter.
        process_set: The ranks that take part. Default all.

    Returns:
        The rows. If `splits` is given, also the number of rows received from each rank.

    Raises:
        ValueError: The splits do not fit the tensor or the number of ranks.
        HorovodInternalError: The ranks' tensors do not match, or a rank is gone.
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
    """Start an alltoall. `synchronize(handle)` returns the received rows, and the number of rows from each rank."""

    def make_fields() -> dict[str, Any]:
        counts = resolve_splits(tensor, splits, process_set.size() or 1)
        return {"tensor": validate_tensor(tensor).narrow(0, 0, sum(counts)), "splits": counts}

    return submit(OperationKind.ALLTOALL, name, process_set, make_fields)


def _match_device(splits: Splits, received: torch.Tensor) -> torch.Tensor:
    return received.to(splits.device) if isinstance(splits, torch.Tensor) else received


class Alltoall(torch.autograd.Function):
    """An alltoall. Backward sends each row's gradient to the rank that the row came from."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: Splits | None, name: str | None, process_set: ProcessSet
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the received rows, and the number of rows from each rank."""
        output, received = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.rows, ctx.received, ctx.process_set = tensor.shape[0], received, process_set
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor, None, None, None]:
        """Return the gradients of this rank's rows from the ranks that received them, and zeros for unsent rows."""
        sent, _ = apply_function(Alltoall, gradient.contiguous(), ctx.received, None, ctx.process_set)
        kept = ctx.rows - sent.shape[0]
        if kept:
            sent = torch.cat([sent, sent.new_zeros(kept, *sent.shape[1:])])
        return sent, None, None, None

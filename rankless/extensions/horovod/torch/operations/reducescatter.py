"""Reducescatter: combines tensors element by element, and returns some rows to each rank."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from rankless.extensions.horovod.common.process_sets import ProcessSet, global_process_set
from rankless.extensions.horovod.engine.requests import OperationKind, ReduceOpCode
from rankless.extensions.horovod.exceptions import HorovodInternalError
from rankless.extensions.horovod.torch.compression import Compression, Compressor
from rankless.extensions.horovod.torch.operations.allgather import Allgather, GroupedAllgather
from rankless.extensions.horovod.torch.operations.checks import require_tensors, validate_tensor
from rankless.extensions.horovod.torch.operations.handles import apply_function, submit, submit_group, synchronize
from rankless.extensions.horovod.torch.operations.reduction_rule import ReductionRule, make_reduction_rule


@require_tensors
def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = ReduceOpCode.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's rows of the tensor combined over the ranks. The call is differentiable.

    If the rows do not divide evenly, the first ranks get one row more. Backward gathers the gradients of all ranks, and
    multiplies them by the number of ranks for Sum.

    Args:
        tensor: A contiguous tensor of the same shape and dtype on all ranks, with at least 1 dimension.
        name: The name of the operation. Default a counter.
        compression: How the tensor is compressed for sending. Default `Compression.none`.
        op: Average (default) or Sum.
        process_set: The ranks that take part. Default all.
        prescale_factor: Multiplies the values before the reduction. Default 1.0.
        postscale_factor: Multiplies the values after the reduction. Default 1.0.

    Raises:
        HorovodInternalError: `op` is not supported, the ranks' tensors do not match, or a rank is gone.
    """
    rule = make_reduction_rule(op, prescale_factor, postscale_factor, process_set)
    compressed, context = compression.compress(tensor)
    return compression.decompress(apply_function(Reducescatter, compressed, name, rule), context)


@require_tensors
def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = ReduceOpCode.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a reducescatter. `synchronize(handle)` returns this rank's rows of the combined tensor."""
    return _start(tensor, name, make_reduction_rule(op, prescale_factor, postscale_factor, process_set))


@require_tensors
def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = ReduceOpCode.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Return this rank's rows of each tensor combined over the ranks, all together. The call is differentiable."""
    rule = make_reduction_rule(op, prescale_factor, postscale_factor, process_set)
    pairs = [compression.compress(tensor) for tensor in tensors]
    results = apply_function(GroupedReducescatter, name, rule, *(compressed for compressed, _ in pairs))
    return [compression.decompress(result, context) for result, (_, context) in zip(results, pairs, strict=True)]


@require_tensors
def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = ReduceOpCode.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a grouped reducescatter. `synchronize(handle)` returns this rank's rows of each combined tensor."""
    return _start_group(tensors, name, make_reduction_rule(op, prescale_factor, postscale_factor, process_set))


def _start(tensor: torch.Tensor, name: str | None, rule: ReductionRule) -> int:
    return submit(OperationKind.REDUCESCATTER, name, rule.process_set, partial(_make_fields, tensor, rule))


def _start_group(tensors: Sequence[torch.Tensor], name: str | None, rule: ReductionRule) -> int:
    members = [partial(_make_fields, tensor, rule) for tensor in tensors]
    return submit_group(OperationKind.REDUCESCATTER, name, rule.process_set, members)


def _make_fields(tensor: torch.Tensor, rule: ReductionRule) -> dict[str, Any]:
    if rule.reduction not in (ReduceOpCode.AVERAGE, ReduceOpCode.SUM):
        raise HorovodInternalError(f"Reducescatter supports Average and Sum only; found {rule.reduction.name.title()}.")
    if tensor.dim() == 0:
        raise HorovodInternalError("Reducescatter needs a tensor with a first dimension; found one of 0 dimensions.")
    return {"tensor": validate_tensor(tensor), **rule.fields}


def _scale_gradient(gradient: torch.Tensor, rule: ReductionRule) -> torch.Tensor:
    """Return this rank's contribution to the gradient."""
    factor = rule.prescale * rule.postscale
    if rule.reduction is ReduceOpCode.SUM:
        factor *= rule.process_set.size() or 1
    return gradient.contiguous() if factor == 1.0 else gradient.contiguous() * factor


class Reducescatter(torch.autograd.Function):
    """A reducescatter. Backward gathers the gradients of all ranks' rows."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, rule: ReductionRule) -> torch.Tensor:
        """Return this rank's rows of the combined tensor."""
        ctx.rule = rule
        result: torch.Tensor = synchronize(_start(tensor, name, rule))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return all ranks' gradients, concatenated."""
        return apply_function(Allgather, _scale_gradient(gradient, ctx.rule), None, ctx.rule.process_set), None, None


class GroupedReducescatter(torch.autograd.Function):
    """A grouped reducescatter. Backward gathers the gradients as a group."""

    @staticmethod
    def forward(ctx: Any, name: str | None, rule: ReductionRule, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return this rank's rows of the combined tensors."""
        ctx.rule = rule
        return tuple(synchronize(_start_group(tensors, name, rule)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return, for each tensor, all ranks' gradients, concatenated."""
        scaled_gradients = (_scale_gradient(gradient, ctx.rule) for gradient in gradients)
        return (None, None, *apply_function(GroupedAllgather, None, ctx.rule.process_set, *scaled_gradients))

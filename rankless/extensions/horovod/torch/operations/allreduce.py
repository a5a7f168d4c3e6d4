"""Allreduce: combines tensors of the same shape element by element over the ranks."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from rankless.extensions.horovod.common.process_sets import ProcessSet, global_process_set
from rankless.extensions.horovod.engine.requests import OperationKind
from rankless.extensions.horovod.torch.compression import Compression, Compressor
from rankless.extensions.horovod.torch.operations.checks import require_tensors, validate_tensor
from rankless.extensions.horovod.torch.operations.handles import apply_function, submit, submit_group, synchronize
from rankless.extensions.horovod.torch.operations.reduction_rule import (
    ReductionRule,
    make_reduction_rule,
    resolve_reduction,
)


@require_tensors
def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return a new tensor, combined over the ranks. The call is differentiable.

    Backward combines the gradient in the same way.

    Args:
        tensor: A contiguous tensor of the same shape and dtype on all ranks.
        average: The older form of `op`. Deprecated.
        name: The name of the operation. Default a counter.
        compression: How the tensor is compressed for sending. Default `Compression.none`.
        op: Average (default), Sum, Adasum, Min, Max or Product.
        prescale_factor: Multiplies the values before the reduction. Default 1.0.
        postscale_factor: Multiplies the values after the reduction. Default 1.0.
        process_set: The ranks that take part. Default all.

    Raises:
        ValueError: Both `op` and `average` are given, the tensor is not supported, or its name is in use.
        HorovodInternalError: The ranks' tensors do not match, or a rank is gone.
    """
    rule = make_reduction_rule(resolve_reduction(op, average), prescale_factor, postscale_factor, process_set)
    compressed, context = compression.compress(tensor)
    if compressed.requires_grad and torch.is_grad_enabled():
        result = apply_function(Allreduce, compressed, name, rule)
    else:
        result = synchronize(start(compressed, torch.empty_like(compressed), name, rule))
    return compression.decompress(result, context)


@require_tensors
def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an allreduce. `synchronize(handle)` returns a new tensor, combined over the ranks."""
    rule = make_reduction_rule(resolve_reduction(op, average), prescale_factor, postscale_factor, process_set)
    return start(tensor, torch.empty_like(tensor), name, rule)


@require_tensors
def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Combine the tensor over the ranks in place, and return it."""
    rule = make_reduction_rule(resolve_reduction(op, average), prescale_factor, postscale_factor, process_set)
    synchronize(start(tensor, tensor, name, rule))
    return tensor


@require_tensors
def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an allreduce in place. After `synchronize(handle)` the tensor contains the combined values."""
    rule = make_reduction_rule(resolve_reduction(op, average), prescale_factor, postscale_factor, process_set)
    return start(tensor, tensor, name, rule)


@require_tensors
def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Return new tensors, combined over the ranks all together. The call is differentiable."""
    rule = make_reduction_rule(resolve_reduction(op, average), prescale_factor, postscale_factor, process_set)
    pairs = [compression.compress(tensor) for tensor in tensors]
    results = apply_function(GroupedAllreduce, name, rule, *(compressed for compressed, _ in pairs))
    return [compression.decompress(result, context) for result, (_, context) in zip(results, pairs, strict=True)]


@require_tensors
def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a grouped allreduce. `synchronize(handle)` returns a list of new tensors, combined over the ranks."""
    rule = make_reduction_rule(resolve_reduction(op, average), prescale_factor, postscale_factor, process_set)
    return start_group(tensors, [torch.empty_like(tensor) for tensor in tensors], name, rule)


@require_tensors
def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Combine the tensors over the ranks in place, all together, and return them."""
    rule = make_reduction_rule(resolve_reduction(op, average), prescale_factor, postscale_factor, process_set)
    synchronize(start_group(tensors, tensors, name, rule))
    return list(tensors)


@require_tensors
def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a grouped allreduce in place. After `synchronize(handle)` the tensors contain the combined values."""
    rule = make_reduction_rule(resolve_reduction(op, average), prescale_factor, postscale_factor, process_set)
    return start_group(tensors, tensors, name, rule)


def start(tensor: torch.Tensor, output: torch.Tensor, name: str | None, rule: ReductionRule) -> int:
    """Start one allreduce from `tensor` to `output`, and return its handle."""
    return submit(OperationKind.ALLREDUCE, name, rule.process_set, partial(_make_fields, tensor, output, rule))


def start_group(
    tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], name: str | None, rule: ReductionRule
) -> int:
    """Start a group of allreduces, each from its tensor to its output, and return their handle."""
    members = [partial(_make_fields, tensor, output, rule) for tensor, output in zip(tensors, outputs, strict=True)]
    return submit_group(OperationKind.ALLREDUCE, name, rule.process_set, members)


def _make_fields(tensor: torch.Tensor, output: torch.Tensor, rule: ReductionRule) -> dict[str, Any]:
    values = validate_tensor(tensor)
    # In place, the output is the validated tensor itself.
    return {"tensor": values, "output": values if output is tensor else output, **rule.fields}


class Allreduce(torch.autograd.Function):
    """An allreduce. Backward reduces the gradient by the same rule."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, rule: ReductionRule) -> torch.Tensor:
        """Return the combined values in a new tensor."""
        ctx.rule = rule
        result: torch.Tensor = synchronize(start(tensor, torch.empty_like(tensor), name, rule))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return the gradient, combined by the same rule."""
        return apply_function(Allreduce, gradient.contiguous(), None, ctx.rule), None, None


class GroupedAllreduce(torch.autograd.Function):
    """A grouped allreduce. Backward reduces the gradients as a group by the same rule."""

    @staticmethod
    def forward(ctx: Any, name: str | None, rule: ReductionRule, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the combined values in new tensors."""
        ctx.rule = rule
        outputs = [torch.empty_like(tensor) for tensor in tensors]
        return tuple(synchronize(start_group(tensors, outputs, name, rule)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients, combined by the same rule."""
        contiguous = (gradient.contiguous() for gradient in gradients)
        return (None, None, *apply_function(GroupedAllreduce, None, ctx.rule, *contiguous))

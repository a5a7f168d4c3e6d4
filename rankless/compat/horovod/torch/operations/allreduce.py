"""Tensors of the same shape, combined element by element over the ranks."""

from collections.abc import Sequence
from typing import Any

import torch

from rankless.compat.horovod.common.process_sets import ProcessSet, global_process_set
from rankless.compat.horovod.engine.requests import OperationKind
from rankless.compat.horovod.torch.compression import Compression, Compressor
from rankless.compat.horovod.torch.operations.checks import require_tensors, validate_tensor
from rankless.compat.horovod.torch.operations.differentiable import apply_function
from rankless.compat.horovod.torch.operations.handles import submit, submit_group, synchronize
from rankless.compat.horovod.torch.operations.reductions import ReductionRule, make_reduction_rule, resolve_reduction


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
    """A new tensor, combined over the ranks; gradients flow through. Its gradient is combined in the same way."""
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
    """A handle: `synchronize` gives a new tensor, combined over the ranks."""
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
    """The tensor itself, which now holds the combined values."""
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
    """A handle: after `synchronize` the tensor holds the combined values."""
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
    """New tensors, each combined over the ranks, all at once; gradients flow through."""
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
    """A handle: `synchronize` gives new tensors, each combined over the ranks, all at once."""
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
    """The tensors themselves, which now hold the combined values."""
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
    """A handle: after `synchronize` the tensors hold the combined values."""
    rule = make_reduction_rule(resolve_reduction(op, average), prescale_factor, postscale_factor, process_set)
    return start_group(tensors, tensors, name, rule)


def start(tensor: torch.Tensor, output: torch.Tensor, name: str | None, rule: ReductionRule) -> int:
    """The handle of one allreduce from `tensor` to `output`."""
    fields = _make_fields(tensor, output, rule)
    return submit(OperationKind.ALLREDUCE, name, rule.process_set, **fields)


def start_group(
    tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], name: str | None, rule: ReductionRule
) -> int:
    """The handle of a group of allreduces, each from its tensor to its output."""
    members = [_make_fields(tensor, output, rule) for tensor, output in zip(tensors, outputs, strict=True)]
    return submit_group(OperationKind.ALLREDUCE, name, rule.process_set, members)


def _make_fields(tensor: torch.Tensor, output: torch.Tensor, rule: ReductionRule) -> dict[str, Any]:
    values = validate_tensor(tensor)
    # In place, the output is the very tensor that was checked.
    return {"tensor": values, "output": values if output is tensor else output, **rule.fields}


class Allreduce(torch.autograd.Function):
    """An allreduce, whose gradient is reduced by the same rule."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, rule: ReductionRule) -> torch.Tensor:
        """The combined values, in a new tensor."""
        ctx.rule = rule
        result: torch.Tensor = synchronize(start(tensor, torch.empty_like(tensor), name, rule))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """The gradient, combined by the same rule."""
        return apply_function(Allreduce, gradient.contiguous(), None, ctx.rule), None, None


class GroupedAllreduce(torch.autograd.Function):
    """A grouped allreduce, whose gradients are reduced as a group by the same rule."""

    @staticmethod
    def forward(ctx: Any, name: str | None, rule: ReductionRule, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The combined values, in new tensors."""
        ctx.rule = rule
        outputs = [torch.empty_like(tensor) for tensor in tensors]
        return tuple(synchronize(start_group(tensors, outputs, name, rule)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients, combined by the same rule."""
        contiguous = (gradient.contiguous() for gradient in gradients)
        return (None, None, *apply_function(GroupedAllreduce, None, ctx.rule, *contiguous))

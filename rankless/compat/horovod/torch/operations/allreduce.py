"""Tensors of the same shape, combined element by element over the ranks."""

from collections.abc import Sequence
from typing import Any

import torch

from rankless.compat.horovod.common.process_sets import ProcessSet, global_process_set
from rankless.compat.horovod.engine.requests import Kind
from rankless.compat.horovod.torch.compression import Compression, Compressor
from rankless.compat.horovod.torch.operations.checks import sendable, takes_tensors
from rankless.compat.horovod.torch.operations.differentiable import applied
from rankless.compat.horovod.torch.operations.handles import submit, submit_group, synchronize
from rankless.compat.horovod.torch.operations.reductions import Combining, combining, op_of


@takes_tensors
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
    rule = combining(op_of(op, average), prescale_factor, postscale_factor, process_set)
    small, context = compression.compress(tensor)
    if small.requires_grad and torch.is_grad_enabled():
        result = applied(Allreduce, small, name, rule)
    else:
        result = synchronize(start(small, torch.empty_like(small), name, rule))
    return compression.decompress(result, context)


@takes_tensors
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
    rule = combining(op_of(op, average), prescale_factor, postscale_factor, process_set)
    return start(tensor, torch.empty_like(tensor), name, rule)


@takes_tensors
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
    rule = combining(op_of(op, average), prescale_factor, postscale_factor, process_set)
    synchronize(start(tensor, tensor, name, rule))
    return tensor


@takes_tensors
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
    rule = combining(op_of(op, average), prescale_factor, postscale_factor, process_set)
    return start(tensor, tensor, name, rule)


@takes_tensors
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
    rule = combining(op_of(op, average), prescale_factor, postscale_factor, process_set)
    pairs = [compression.compress(tensor) for tensor in tensors]
    results = applied(GroupedAllreduce, name, rule, *(small for small, _ in pairs))
    return [compression.decompress(result, context) for result, (_, context) in zip(results, pairs, strict=True)]


@takes_tensors
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
    rule = combining(op_of(op, average), prescale_factor, postscale_factor, process_set)
    return start_group(tensors, [torch.empty_like(tensor) for tensor in tensors], name, rule)


@takes_tensors
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
    rule = combining(op_of(op, average), prescale_factor, postscale_factor, process_set)
    synchronize(start_group(tensors, tensors, name, rule))
    return list(tensors)


@takes_tensors
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
    rule = combining(op_of(op, average), prescale_factor, postscale_factor, process_set)
    return start_group(tensors, tensors, name, rule)


def start(tensor: torch.Tensor, output: torch.Tensor, name: str | None, rule: Combining) -> int:
    """The handle of one allreduce from `tensor` to `output`."""
    fields = _fields(tensor, output, rule)
    return submit(Kind.ALLREDUCE, name, rule.process_set, **fields)


def start_group(
    tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], name: str | None, rule: Combining
) -> int:
    """The handle of a group of allreduces, each from its tensor to its output."""
    members = [_fields(tensor, output, rule) for tensor, output in zip(tensors, outputs, strict=True)]
    return submit_group(Kind.ALLREDUCE, name, rule.process_set, members)


def _fields(tensor: torch.Tensor, output: torch.Tensor, rule: Combining) -> dict[str, Any]:
    values = sendable(tensor)
    # In place, the output is the very tensor that was checked.
    return {"tensor": values, "output": values if output is tensor else output, **rule.fields}


class Allreduce(torch.autograd.Function):
    """An allreduce, whose gradient is reduced by the same rule."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, rule: Combining) -> torch.Tensor:
        """The combined values, in a new tensor."""
        ctx.rule = rule
        result: torch.Tensor = synchronize(start(tensor, torch.empty_like(tensor), name, rule))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """The gradient, combined by the same rule."""
        return applied(Allreduce, gradient.contiguous(), None, ctx.rule), None, None


class GroupedAllreduce(torch.autograd.Function):
    """A grouped allreduce, whose gradients are reduced as a group by the same rule."""

    @staticmethod
    def forward(ctx: Any, name: str | None, rule: Combining, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The combined values, in new tensors."""
        ctx.rule = rule
        outputs = [torch.empty_like(tensor) for tensor in tensors]
        return tuple(synchronize(start_group(tensors, outputs, name, rule)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients, combined by the same rule."""
        whole = (gradient.contiguous() for gradient in gradients)
        return (None, None, *applied(GroupedAllreduce, None, ctx.rule, *whole))

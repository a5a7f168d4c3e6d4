"""The checks of the arguments of all_reduce, reduce and reduce_scatter, and what each then runs."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankless.collectives.backends.calls.call_arguments import (
    require_count,
    require_dense,
    require_one_dtype,
    require_values,
)
from rankless.collectives.backends.calls.prepared_call import PreparedCall
from rankless.collectives.backends.calls.tensor_views import flatten, is_plain, write_back
from rankless.collectives.backends.fused_reductions import FusedCall, FusedReductions
from rankless.collectives.backends.reductions import view_as_reducible
from rankless.collectives.backends.shared_reductions import SharedReductions


def prepare_all_reduce(reductions: SharedReductions, tensors: Sequence[Tensor], operation: Any) -> PreparedCall:
    """Reduce tensors of one dtype over all ranks, each in place.

    Raises:
        CallError: A tensor is not dense and on the CPU, or the reduction does not take its dtype.
    """
    if len(tensors) == 1 and is_plain(tensors[0]) and not tensors[0].dtype.is_complex:
        (tensor,) = tensors
        reduction = reductions.get_reduction(operation, tensor.dtype)
        return PreparedCall(lambda: reductions.all_reduce(flatten(tensor), reduction), tensors, list(tensors))
    require_dense(tensors)
    require_one_dtype(tensors)
    views = [view_as_reducible(tensor, operation) for tensor in tensors]
    reduction = reductions.get_reduction(operation, views[0].dtype)

    def run_one() -> None:
        flat = flatten(views[0])
        reductions.all_reduce(flat, reduction)
        write_back(views[0], flat)

    def run_several() -> None:
        flat = torch.cat([flatten(view) for view in views])
        reductions.all_reduce(flat, reduction)
        for view, part in zip(views, flat.split([view.numel() for view in views]), strict=True):
            view.detach().copy_(part.view(view.shape))

    return PreparedCall(run_one if len(views) == 1 else run_several, views, list(tensors))


class FusedTensors(NamedTuple):
    """What `prepare_fused_all_reduce` reduces: the inputs, and the outputs of the same lengths."""

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]


def prepare_fused_all_reduce(
    reductions: SharedReductions,
    fused: FusedReductions,
    tensors: FusedTensors,
    operation: Any,
    *,
    before: Callable[[Tensor], object],
    after: Callable[[Tensor], object],
) -> PreparedCall:
    """Reduce tensors over all ranks into others, as if they were one. `before` and `after` are as in `FusedCall`.

    Raises:
        CallError: As `prepare_all_reduce`, or an output has another length than its input.
    """
    inputs, outputs = tensors
    require_count(outputs, len(inputs), "outputs")
    require_dense([*inputs, *outputs])
    require_one_dtype([*inputs, *outputs])
    for value, output in zip(inputs, outputs, strict=True):
        require_values(output, value.numel(), "an output of an all_reduce")
    reduction = reductions.get_reduction(operation, inputs[0].dtype)

    def run() -> None:
        flats = [flatten(output) for output in outputs]
        fused.all_reduce(FusedCall([flatten(value) for value in inputs], flats, reduction, before, after))
        for output, flat in zip(outputs, flats, strict=True):
            write_back(output, flat)

    return PreparedCall(run, outputs, list(outputs))


def prepare_reduce(reductions: SharedReductions, tensor: Tensor, operation: Any, root: int) -> PreparedCall:
    """Reduce a tensor over all ranks, into the root's. Raises as `prepare_all_reduce`."""
    require_dense([tensor])
    view = view_as_reducible(tensor, operation)
    reduction = reductions.get_reduction(operation, view.dtype)

    def run() -> None:
        flat = flatten(view)
        reductions.reduce(flat, reduction, root)
        if reductions.rank == root:
            write_back(view, flat)

    return PreparedCall(run, [view], [tensor])


def prepare_reduce_scatter(
    reductions: SharedReductions, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], operation: Any
) -> PreparedCall:
    """Make calls of reduce_scatter. The inputs of each are a tensor for each rank, or one for all.

    Raises:
        CallError: As `prepare_all_reduce`, or an output has another length than what is reduced into it.
    """
    size = reductions.size
    require_dense([*outputs, *(value for values in inputs for value in values)])
    views = [view_as_reducible(output, operation) for output in outputs]
    calls = []
    for output, view, values in zip(outputs, views, inputs, strict=True):
        if len(values) == 1:
            require_values(values[0], size * output.numel(), "the input of a reduce_scatter")
        else:
            require_values(output, values[reductions.rank].numel(), "the output of a reduce_scatter")
        parts = [view_as_reducible(value, operation) for value in values]
        require_one_dtype([view, *parts])
        calls.append((view, parts, reductions.get_reduction(operation, view.dtype)))

    def run() -> None:
        for view, parts, reduction in calls:
            flat, values = flatten(view), [flatten(part) for part in parts]
            if len(values) == 1 and size > 1:
                values = list(values[0].split(max(1, len(flat)))) if len(flat) else [flat] * size
            reductions.reduce_scatter(flat, values, reduction)
            write_back(view, flat)

    return PreparedCall(run, views, list(outputs))

"""Broadcast of named tensors."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from rankless.extensions.horovod.common.process_sets import ProcessSet, global_process_set
from rankless.extensions.horovod.torch.operations.broadcast import broadcast_async_
from rankless.extensions.horovod.torch.operations.handles import synchronize


def broadcast_parameters(
    params: dict[str, torch.Tensor] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Copy the root's values into every tensor.

    Args:
        params: The tensors: `model.state_dict()`, `model.named_parameters()`, or a list.
        root_rank: The root's rank, counted over the whole job.
        process_set: The ranks that take part. Default all.

    Raises:
        ValueError: `params` is anything else.
    """
    if isinstance(params, dict):
        named: list[tuple[str | None, Any]] = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, str | torch.Tensor):
        named = [each if isinstance(each, tuple) else (None, each) for each in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    for name, value in named:
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"invalid params: {name} is of type {type(value)}; only tensors can be broadcast")
    broadcast_tensors(named, root_rank, process_set)


def broadcast_tensors(
    named: Sequence[tuple[str | None, torch.Tensor]], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Copy the root's values into every tensor, whatever its memory layout."""
    started = []
    for name, tensor in named:
        values = tensor.detach()
        buffer = values.contiguous()
        started.append((broadcast_async_(buffer, root_rank, name, process_set), buffer, values))
    for handle, buffer, values in started:
        synchronize(handle)
        if buffer is not values:
            values.copy_(buffer)

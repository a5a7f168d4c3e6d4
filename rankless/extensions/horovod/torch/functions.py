"""Broadcasts of parameters, optimizer state and objects, under the module name that Horovod has for them.

Note [no step]: Horovod fills an empty state by a step with zero gradients, which changes the weights if there is weight
decay. Here the root describes its state, and the others allocate tensors for it, so no rank steps. A state that is
empty on the root is empty on all ranks. As after Horovod's step, parameters have gradients of zeros afterwards.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle  # type: ignore[import-untyped]  # it has no types
import torch

from rankless.extensions.horovod import context
from rankless.extensions.horovod.common.process_sets import ProcessSet, global_process_set
from rankless.extensions.horovod.torch.operations.allgather import allgather_async
from rankless.extensions.horovod.torch.operations.broadcast import broadcast_, broadcast_async_
from rankless.extensions.horovod.torch.operations.handles import synchronize

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]


DEFAULT_NAME = "object"
"""Horovod names an object by its type. If other ranks pass None, the names differ, and the ranks wait forever."""


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the root's object on every rank.

    Args:
        obj: The object to broadcast. Ranks other than the root may pass None.
        root_rank: The root's rank, counted over the whole job. Default 0.
        name: The name of the operation. Default "object".
        process_set: The ranks that take part. Default all.
    """
    name = name or DEFAULT_NAME
    is_root = context.current().world.rank == root_rank
    content = _pickle(obj) if is_root else torch.empty(0, dtype=torch.uint8, device="cpu")
    size = torch.tensor([content.numel()], device="cpu")
    broadcast_(size, root_rank, f"{name}.sz", process_set)
    if not is_root:
        content = torch.empty(int(size), dtype=torch.uint8, device="cpu")
    broadcast_(content, root_rank, f"{name}.t", process_set)
    return obj if is_root else _unpickle(content)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks, in rank order.

    Args:
        obj: This rank's object.
        name: The name of the operation. Default "object".
        process_set: The ranks that take part. Default all.
    """
    name = name or DEFAULT_NAME
    content = _pickle(obj)
    sizes_handle = allgather_async(torch.tensor([content.numel()], device="cpu"), f"{name}.sz", process_set)
    contents_handle = allgather_async(content, f"{name}.t", process_set)
    sizes = synchronize(sizes_handle).tolist()
    return [_unpickle(part) for part in synchronize(contents_handle).split(sizes)]


def _pickle(obj: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=torch.uint8)


def _unpickle(content: torch.Tensor) -> Any:
    return cloudpickle.loads(content.numpy().tobytes())


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


@dataclass(frozen=True)
class TensorPlaceholder:
    """A tensor of the root's state, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool

    def allocate(self, parameter: torch.Tensor | None) -> torch.Tensor:
        """Return an uninitialized tensor, with the parameter's memory layout if it has the same shape."""
        device = torch.device("cpu") if self.on_cpu or parameter is None else parameter.device
        if parameter is not None and parameter.shape == torch.Size(self.shape):
            return torch.empty_like(parameter, dtype=self.dtype, device=device, requires_grad=False)
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
) -> None:
    """Copy the root's optimizer state and options, such as the learning rate, to every rank.

    Where the state is empty, parameters without a gradient get one of zeros.

    Args:
        optimizer: The optimizer. It has the same parameters on every rank.
        root_rank: The root's rank, counted over the whole job.
        model: Ignored. Horovod computes gradients of it for a first step.

    Raises:
        ValueError: The optimizer is LBFGS, or ranks have different parameters.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not optimizer.state_dict()["state"]:
        _fill_gradients(optimizer, parameters)
    is_root = context.current().world.rank == root_rank
    description = broadcast_object(_describe_state(optimizer) if is_root else None, root_rank, "optimizer_state")
    state = optimizer.state_dict()["state"] if is_root else _allocate_tensors(description["state"], parameters)
    broadcast_tensors(list(_iterate_tensors(state)), root_rank)
    if not is_root:
        _set_options(optimizer, description["options"])
        optimizer.state.clear()
        for key, value in state.items():
            optimizer.state[parameters[key] if isinstance(key, int) else key] = value


def _fill_gradients(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
    """Give zeros to the parameters that have no gradient."""
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is None:
            zeros = torch.zeros_like(parameter, requires_grad=False)
            parameter.grad = zeros.to_sparse() if isinstance(optimizer, torch.optim.SparseAdam) else zeros


def _describe_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's state with a `TensorPlaceholder` for each tensor, and the options of each group."""
    content = optimizer.state_dict()
    options = [{key: value for key, value in group.items() if key != "params"} for group in content["param_groups"]]
    sizes = [len(group["params"]) for group in content["param_groups"]]
    return {"state": _replace_tensors(content["state"]), "options": list(zip(sizes, options, strict=True))}


def _replace_tensors(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorPlaceholder(tuple(value.shape), value.dtype, value.device.type == "cpu")
    if isinstance(value, dict):
        return {key: _replace_tensors(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_replace_tensors(item) for item in value)
    return value


def _allocate_tensors(state: dict[Any, Any], parameters: list[torch.Tensor]) -> dict[Any, Any]:
    """Return the root's state with an uninitialized tensor for each `TensorPlaceholder`."""
    return {key: _allocate(value, parameters[key] if isinstance(key, int) else None) for key, value in state.items()}


def _allocate(value: Any, parameter: torch.Tensor | None) -> Any:
    if isinstance(value, TensorPlaceholder):
        return value.allocate(parameter)
    if isinstance(value, dict):
        return {key: _allocate(item, parameter) for key, item in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_allocate(item, parameter) for item in value)
    return value


def _iterate_tensors(state: dict[Any, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of the state with the name `key.n`, where n counts the tensors with that key."""
    counts: dict[str, int] = {}

    def walk(key: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
        if isinstance(value, torch.Tensor):
            counts[key] = counts.get(key, 0) + 1
            yield f"{key}.{counts[key]}", value
        elif isinstance(value, dict):
            for inner, item in value.items():
                yield from walk(str(inner), item)
        elif isinstance(value, list | tuple):
            for item in value:
                yield from walk(key, item)

    yield from walk("state", state)


def _set_options(optimizer: torch.optim.Optimizer, description: list[tuple[int, dict[str, Any]]]) -> None:
    """Set each group's options in place, since schedulers and a wrapped optimizer share the groups."""
    group_sizes = [len(group["params"]) for group in optimizer.param_groups]
    if group_sizes != [size for size, _ in description]:
        raise ValueError(
            f"The root's optimizer has groups of {[size for size, _ in description]} parameters, "
            f"this rank's of {group_sizes}. Build the same optimizer on every rank."
        )
    for group, (_, options) in zip(optimizer.param_groups, description, strict=True):
        group.update(options)

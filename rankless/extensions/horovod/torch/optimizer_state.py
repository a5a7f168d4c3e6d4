"""Broadcast of an optimizer's state.

Note [no step]: Horovod fills an empty state by a step with zero gradients, which changes the weights if there is weight
decay. Here the root describes its state, and the others allocate tensors for it, so no rank steps. A state that is
empty on the root is empty on all ranks. As after Horovod's step, parameters have gradients of zeros afterwards.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rankless.extensions.horovod import context
from rankless.extensions.horovod.torch.objects import broadcast_object
from rankless.extensions.horovod.torch.parameter_broadcast import broadcast_tensors


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

"""Build models without memory for their values, and compute the values later, as parts of the model."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn

from rankless.deferred_models.deferred_tensor import DeferredTensor, RecordingMode, pause_recording
from rankless.deferred_models.recording import OperatorRecording
from rankless.errors import DeferredError
from rankless.user_code import caller_line


class DeferredBuild:
    """What `rankless.deferred()` returns: the context in which models are built without values.

    Example:
        >>> with rankless.deferred() as build:
        ...     model = torch.nn.Linear(3, 1)
        >>> build.materialize(model)
        >>> model.weight.shape
        torch.Size([1, 3])
    """

    def __init__(self) -> None:
        self._recording = OperatorRecording()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Begin to defer."""
        self._stack.enter_context(RecordingMode(self._recording))
        return self

    def __exit__(self, *error: object) -> None:
        """End it."""
        self._stack.close()
        self._recording.release_memory()

    def materialize(self, *modules: nn.Module) -> None:
        """Compute the values of modules that were built in the block. A job does so at its first call.

        Args:
            *modules: The modules. Their parameters and buffers stay the same objects, so that optimizers know them.

        Raises:
            DeferredError: An argument is no module.

        Example:
            >>> with rankless.deferred() as build:
            ...     model = torch.nn.Linear(3, 1)
            >>> build.materialize(model)
            >>> model(torch.ones(2, 3)).shape
            torch.Size([2, 1])
        """
        others = [type(item).__name__ for item in modules if not isinstance(item, nn.Module)]
        if others:
            raise DeferredError(
                expected="modules that were built in `with rankless.deferred()`",
                found=others[0],
                fix="pass the model itself",
                where=caller_line(),
            )
        materialize(modules)


def materialize(modules: Iterable[nn.Module]) -> None:
    """Compute the values of all deferred tensors of some modules, one storage after the other."""
    materialize_tensors(find_deferred(modules))


def materialize_tensors(tensors: Iterable[DeferredTensor]) -> None:
    """Compute the values of deferred tensors, one storage after the other.

    All deferred tensors that share a storage get their values together, also those of other modules: they share it on.
    """
    wanted = list(tensors)
    sharing: dict[tuple[OperatorRecording, int], list[DeferredTensor]] = {}
    for recording in {item.recording for item in wanted}:
        for number, item in list(recording.alive.items()):
            sharing.setdefault((recording, recording.storage(number)), []).append(item)
    for tensor in wanted:
        if isinstance(tensor, DeferredTensor):  # not with an earlier one that shared its memory
            group = sharing[tensor.recording, tensor.recording.storage(tensor.number)]
            for item, value in zip(group, compute_values(group), strict=True):
                become(item, value)


def compute_values(tensors: list[DeferredTensor]) -> list[Tensor]:
    """Return the values of deferred tensors that share a storage."""
    with pause_recording():
        return tensors[0].recording.evaluate([item.number for item in tensors])


def find_deferred(modules: Iterable[nn.Module]) -> list[DeferredTensor]:
    """Return the deferred tensors of modules, each once: parameters, buffers and plain attributes."""
    found: dict[int, DeferredTensor] = {}
    for module in modules:
        for part in module.modules():
            for value in list_values(part):
                if isinstance(value, DeferredTensor):
                    found.setdefault(id(value), value)
    return list(found.values())


def list_values(module: nn.Module) -> Iterator[Any]:
    """Yield a module's attributes, and what lists, tuples and dicts among them hold, as those of its parameters."""
    for value in vars(module).values():
        if isinstance(value, list | tuple):
            yield from value
        elif isinstance(value, dict):
            yield from value.values()
        else:
            yield value


def become(tensor: Tensor, value: Tensor) -> None:
    """Turn a tensor without memory into one with a value: the object stays the same.

    Args:
        tensor: A tensor of a subclass, such as a `DeferredTensor`. It loses the attributes that its class declares.
        value: The value.
    """
    is_parameter = isinstance(tensor, nn.Parameter)
    requires_grad = tensor.requires_grad and tensor.is_leaf
    real = nn.Parameter(value, requires_grad) if is_parameter else value.requires_grad_(requires_grad)
    own = {*type(tensor).__annotations__, "_is_param"}
    attributes = {name: item for name, item in vars(tensor).items() if name not in own}
    tensor.__class__ = type(real)
    vars(tensor).clear()
    vars(tensor).update(attributes)
    torch._C._swap_tensor_impl(tensor, real)

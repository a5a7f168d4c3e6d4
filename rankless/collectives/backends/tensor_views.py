"""Flat views of the tensors of a call, whatever their strides, and the checks of what a call can take."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from rankless.errors import ConfigError


def require_dense(tensors: Iterable[torch.Tensor]) -> None:
    """Raise a `ConfigError` unless all tensors are dense and in the memory of the CPU."""
    for tensor in tensors:
        if not tensor.is_cpu or tensor.layout is not torch.strided:
            raise ConfigError(
                expected="dense tensors on the CPU, because the group is in shared memory",
                found=f"a tensor with layout {tensor.layout} on {tensor.device}",
                fix="move it to the CPU and make it dense, or use another process group",
            )


def require_count(tensors: Sequence[object], count: int, what: str) -> None:
    """Raise a `ConfigError` unless there are `count` of something that belongs to ranks."""
    if len(tensors) != count:
        raise ConfigError(
            expected=f"{count} {what}", found=f"{len(tensors)}", fix="pass one for each rank of the group"
        )


def require_values(tensor: torch.Tensor, count: int, what: str) -> None:
    """Raise a `ConfigError` unless a tensor has `count` values."""
    if tensor.numel() != count:
        raise ConfigError(
            expected=f"{count} values in {what}",
            found=f"{tensor.numel()}, of shape {tuple(tensor.shape)}",
            fix="pass tensors whose sizes match",
        )


def require_one_dtype(tensors: Sequence[torch.Tensor]) -> None:
    """Raise a `ConfigError` unless all tensors have one dtype."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        raise ConfigError(
            expected="tensors of one dtype", found=sorted(map(str, dtypes)), fix="convert them to one dtype"
        )


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory holds its values one after the other."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values as a flat contiguous tensor: a view if it is plain, else a copy."""
    tensor = tensor.detach()
    if not is_plain(tensor):
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    if tensor.dim() != 1:
        tensor = tensor.view(-1)
    # A tensor of one value or none may have any stride.
    return tensor if tensor.stride(0) == 1 else tensor.as_strided((tensor.numel(),), (1,))


def flatten_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes as a flat contiguous uint8 tensor: a view if it is plain, else a copy."""
    flat = flatten(tensor)
    return flat if flat.dtype is torch.uint8 else flat.view(torch.uint8)


def write_back(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    """Copy the values of `flatten` or `flatten_bytes` to the tensor, if it is not plain."""
    if not is_plain(tensor):
        tensor.detach().copy_(flat.view(tensor.dtype).view(tensor.shape))


@contextmanager
def writable(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Allow changes of tensors that were made in `torch.inference_mode()`."""
    if any(tensor.is_inference() for tensor in tensors) and not torch.is_inference_mode_enabled():
        with torch.inference_mode():
            yield
    else:
        yield

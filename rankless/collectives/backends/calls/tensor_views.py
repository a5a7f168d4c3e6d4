"""Flat views of the tensors of a call, whatever their strides."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the CPU, and its memory holds its values one after the other."""
    if not tensor.is_cpu or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return False
    return not tensor.is_neg() and not tensor.is_conj()


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

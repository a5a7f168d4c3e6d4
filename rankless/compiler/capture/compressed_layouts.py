"""Tensors in compressed sparse layouts, which PyTorch cannot trace: a capture refuses them, and one device warns."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rankless.errors import CaptureError

LAYOUTS = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
EXPECTED = "sparse tensors in the COO layout, which PyTorch can trace"
FIX = "convert it outside the job, with to_sparse_coo()"


def find_compressed_tensor(function: Callable[..., Any], modules: Mapping[str, nn.Module]) -> CaptureError | None:
    """Return the error that a capture raises for a compressed sparse tensor; None if a job reads none.

    Args:
        function: The job's function. Tensors in its closure and among the globals that it names are seen.
        modules: The job's modules by name, whose parameters and buffers are seen.
    """
    for name, value in list_read_tensors(function, modules):
        if value.layout in LAYOUTS:
            return CaptureError(expected=EXPECTED, found=f"{name} has the layout {value.layout}", fix=FIX)
    return None


def list_read_tensors(function: Callable[..., Any], modules: Mapping[str, nn.Module]) -> Iterable[tuple[str, Tensor]]:
    """Yield the tensors that a job may read besides its arguments, by name."""
    for name, module in modules.items():
        yield from module.named_parameters(prefix=name)
        yield from module.named_buffers(prefix=name)
    try:
        variables = inspect.getclosurevars(function)
    except (TypeError, ValueError):  # no Python function, or a variable of the closure has no value yet
        return
    for name, value in {**variables.globals, **variables.nonlocals}.items():
        if isinstance(value, Tensor):
            yield name, value

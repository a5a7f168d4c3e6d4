"""Run a job in another precision than its script's. `--dtype float64` tells rounding from a fault.

Models are cast once, in place, so that optimizers and schedulers keep their parameters. Floating-point arguments are
cast at each call. Integers and booleans stay unchanged. Complex numbers are cast with the floats.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from rankless.errors import ConfigError
from rankless.jobs.arguments import FlattenedArguments
from rankless.jobs.job_definition import JobDefinition


def cast_job(job: JobDefinition, dtype: torch.dtype) -> None:
    """Cast a job's parameters, gradients, buffers and optimizer states to `dtype`."""
    for module in job.modules.values():
        # `module.to(dtype)` would drop the imaginary part of what is complex.
        module._apply(lambda tensor: cast(tensor, dtype))
    for optimizer in job.optimizers:
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    state[key] = cast(value, dtype)


def cast_arguments(arguments: FlattenedArguments, dtype: torch.dtype) -> FlattenedArguments:
    """Return a call with its floating-point tensors in `dtype`; a loader's batches stay logical."""
    return replace(arguments, tensors=tuple(cast(tensor, dtype) for tensor in arguments.tensors))


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in `dtype` or its complex counterpart; other dtypes stay unchanged."""
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def require_floating(dtype: torch.dtype, line: str) -> None:
    """Raise `ConfigError` for a dtype that torch does not accept as default."""
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ConfigError(
            expected="dtype= as a floating-point dtype of torch, the default of tensors made in the job",
            found=str(dtype),
            fix="pass for example torch.float32; declare the dtype of labels in their placeholder",
            where=line,
        )


@contextlib.contextmanager
def use_default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Set torch's default dtype inside the context; None leaves it unchanged."""
    before = torch.get_default_dtype()
    if dtype in (None, before):
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)

"""The functions of Horovod's compiled module that tools call, on the same handles as `hvd.synchronize`."""

import torch

from rankless.extensions.horovod.common.basics import shutdown
from rankless.extensions.horovod.torch.operations.handles import poll, synchronize

__all__ = ["horovod_torch_poll", "horovod_torch_reset", "horovod_torch_wait_and_clear"]


def horovod_torch_poll(handle: int) -> bool:
    """Return whether an operation has ended. Raises ValueError for an unknown handle."""
    return poll(handle)


def horovod_torch_wait_and_clear(handle: int) -> torch.Tensor | None:
    """Wait for an operation, and return its result; None for an unknown handle."""
    result: torch.Tensor | None = synchronize(handle)
    return result


def horovod_torch_reset() -> None:
    """Leave the job, and forget all handles."""
    shutdown()

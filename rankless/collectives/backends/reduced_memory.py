"""Memory for tensors that workers reduce again and again: where their process group need not copy it."""

from collections.abc import Callable

import torch

from rankless.collectives.backends.process_group import SharedMemoryProcessGroup
from rankless.parallel.mesh import WorkerGroup

LEAST_BYTES = 64 << 10
"""A copy of fewer bytes costs less than the wait that it saves."""
MOST_BYTES = 256 << 20
"""So much of each worker's memory at most is shared for this by one group."""


def allocate_reduced(
    count: int, dtype: torch.dtype, device: torch.device, *, among: WorkerGroup, on_close: Callable[[], None]
) -> torch.Tensor | None:
    """Return a flat tensor for `start_all_reduce` in memory that the workers share, or None if there is no such memory.

    All workers of the group call this at the same point, with the same arguments.

    Args:
        count: The number of values.
        dtype: Their dtype.
        device: Where they must be.
        among: The workers.
        on_close: A method that is called when their group is closed: the tensor is then of no more use.
    """
    group = among.group
    if not isinstance(group, SharedMemoryProcessGroup) or device.type != "cpu" or among.size == 1:
        return None
    if count * dtype.itemsize < LEAST_BYTES:
        return None
    allocated: torch.Tensor | None = group.allocate(count, dtype, limit_bytes=MOST_BYTES, on_close=on_close)
    return allocated

"""Memory that the workers of a group share: for tensors that they reduce, and memory that is one for all of them."""

from collections.abc import Callable

import torch
from torch import Tensor

from rankless.collectives.backends.process_group import SharedMemoryProcessGroup
from rankless.parallel.mesh import WorkerGroup

LEAST_BYTES = 64 << 10
"""A copy of fewer bytes costs less than the wait that it saves."""
MOST_BYTES = 256 << 20
"""So much of each worker's memory at most is shared for this by one group."""


def allocate_reduced(
    count: int, dtype: torch.dtype, device: torch.device, *, among: WorkerGroup, on_close: Callable[[], None]
) -> Tensor | None:
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
    allocated: Tensor | None = group.allocate(count, dtype, limit_bytes=MOST_BYTES, on_close=on_close)
    return allocated


def can_have_common_memory(where: torch.device, *, among: WorkerGroup) -> bool:
    """Return whether workers may map the same memory: they are on the CPU of one host, and so is their group.

    Args:
        where: The device of what is to lie in the memory.
        among: The workers. The answer is the same on all of them.
    """
    return isinstance(among.group, SharedMemoryProcessGroup) and where.type == "cpu" and among.size > 1


def map_common(byte_count: int, terms: str, *, among: WorkerGroup) -> Tensor | None:
    """Return a tensor of bytes that is the same memory on all workers; None on all of them if there is none.

    All workers call this at the same point. It waits for all of them.

    Args:
        byte_count: The number of bytes.
        terms: What the workers must agree on, as text. If their texts differ there is no memory.
        among: The workers.
    """
    if not isinstance(among.group, SharedMemoryProcessGroup):
        return None
    mapped: Tensor | None = among.group.map_common(byte_count, terms)
    return mapped

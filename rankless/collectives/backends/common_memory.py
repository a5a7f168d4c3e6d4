"""Memory that is the same on all workers: what one writes, the others read."""

from torch import Tensor, device

from rankless.collectives.backends.process_group import SharedMemoryProcessGroup
from rankless.parallel.mesh import WorkerGroup


def can_have_common_memory(where: device, *, among: WorkerGroup) -> bool:
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

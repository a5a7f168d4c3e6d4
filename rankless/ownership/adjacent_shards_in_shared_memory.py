"""Memory in which the workers of one host hold divided parameters together, so that each worker reads the whole.

Note [shards in one memory]: the shards of a parameter lie next to each other in memory that all workers map, as the
whole parameter lies in memory. Each worker writes only its shard. Programs read the whole, so they gather nothing.
Writing and reading alternate: `begin_write` waits until no worker reads any more, and `begin_read` until all workers
have written. Both wait only if the other came before. All workers call them in the same order, as they call
collectives. A program only reads its inputs, and returns nothing that lies in this memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rankless.collectives.backends.shared_tensor_memory import can_have_common_memory, map_common
from rankless.collectives.mesh_collectives import wait_for_all
from rankless.ownership.shard_layout import ShardLayout
from rankless.parallel.mesh import WorkerGroup

ALIGNED_BYTES = 64
"""Each parameter begins at a multiple of this, as PyTorch's own memory does."""


@dataclass(frozen=True, kw_only=True)
class SharedValue:
    """The place of a divided parameter in memory that all workers map; see Note [shards in one memory]."""

    memory: int
    """The number of the memory in which it lies."""
    whole: Tensor
    """All of it, which is only read."""
    shard: Tensor
    """What this worker writes."""


class SharedMemoryShards:
    """The divided parameters in memory that all workers map, and whose turn it is: that of readers, or of writers.

    Args:
        group: The workers that divide parameters.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._memories = 0
        self._is_written = False

    def allocate(self, parameters: Sequence[tuple[str, Tensor, ShardLayout]]) -> dict[str, SharedValue]:
        """Return places for parameters, by name, for workers to write to. Those without one stay private. Collective.

        All workers get places for the same parameters.

        Args:
            parameters: The name, the parameter and the layout of each.
        """
        group = self._group
        fitting = [
            (name, layout, item.dtype)
            for name, item, layout in parameters
            if item.numel() and layout.is_contiguous_shard() and can_have_common_memory(item.device, among=group)
        ]
        if not can_have_common_memory(torch.device("cpu"), among=group) or not parameters:
            return {}
        self.begin_write()
        sizes = [round_up(torch.Size(layout.shape).numel() * dtype.itemsize) for _, layout, dtype in fitting]
        memory = map_common(sum(sizes), repr(fitting), among=group)
        if memory is None:
            return {}
        self._memories += 1
        self._is_written = True
        return {
            name: self._place(part, layout, dtype)
            for part, (name, layout, dtype) in zip(memory.split(sizes), fitting, strict=True)
        }

    def begin_write(self, *, waits: bool = True) -> None:
        """Wait until no worker reads any more. Collective.

        Args:
            waits: Whether some may still read.
        """
        if self._memories and not self._is_written:
            if waits:
                wait_for_all(among=self._group)
            self._is_written = True

    def begin_read(self) -> None:
        """Wait until all workers have written. Collective."""
        if self._is_written:
            wait_for_all(among=self._group)
            self._is_written = False

    def _place(self, part: Tensor, layout: ShardLayout, dtype: torch.dtype) -> SharedValue:
        """Return the place of a parameter in its part of a memory."""
        rank = self._group.rank
        flat = part.view(dtype)[: torch.Size(layout.shape).numel()]
        start = sum(map(layout.shard_size, range(rank)))
        own = flat[start : start + layout.shard_size(rank)]
        return SharedValue(
            memory=self._memories,
            whole=layout.view_flat(flat, layout.shape),
            shard=layout.view_flat(own, layout.shard_shape(rank)),
        )


def round_up(byte_count: int) -> int:
    """Return a number of bytes after which the next parameter may begin."""
    return -(-byte_count // ALIGNED_BYTES) * ALIGNED_BYTES

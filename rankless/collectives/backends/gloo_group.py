"""Makes process groups of Gloo, and keeps them in forked processes.

The destructor of a group waits for its threads, and ends a process that has been forked and does not have them. So such
a process keeps the groups of the one that has forked it until it ends.
"""

import os
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch.distributed as dist

_groups: WeakSet[Any] = WeakSet()  # pieces of state that the design allows a module: they are of the process
_kept: list[Any] = []


def make_gloo_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a `torch.distributed.ProcessGroupGloo`.

    Args:
        store: A store with keys of its own for this group.
        rank: The rank of this process in it.
        size: The number of its ranks.
        timeout: How long its ranks wait for each other.
    """
    made: Any = dist.ProcessGroupGloo  # PyTorch has no annotations for its arguments
    group = made(store, rank, size, timeout)
    _groups.add(group)
    return group


os.register_at_fork(after_in_child=lambda: _kept.extend(_groups))

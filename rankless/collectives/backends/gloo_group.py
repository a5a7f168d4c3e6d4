"""Makes process groups of Gloo, and keeps them in forked processes.

The destructor of a group waits for its threads, and ends a process that has been forked and does not have them. So such
a process keeps the groups of the one that has forked it until it ends.
"""

import os
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch.distributed as dist


class GroupsOfProcess:
    """The groups of Gloo of this process, which a process that it forks keeps."""

    def __init__(self) -> None:
        self._groups: WeakSet[Any] = WeakSet()
        self._kept: list[Any] = []
        os.register_at_fork(after_in_child=self._keep)

    def add(self, group: Any) -> None:
        """Keep a group in forked processes."""
        self._groups.add(group)

    def _keep(self) -> None:
        self._kept += self._groups


GROUPS = GroupsOfProcess()


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
    GROUPS.add(group)
    return group

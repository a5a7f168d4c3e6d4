"""Keeps the process groups that a script has destroyed until their destructors cannot hang.

Note [destructors of Gloo groups]: the destructor of a Gloo group waits for the group's threads to end. Such a thread
takes Python's global lock when it frees the tensors of its last collective. Python releases the lock while it drops
its own last reference to a group. `DistributedDataParallel` also has a reference, in C++, and holds the lock while it
drops that one. If this is the last one and a thread is about to take the lock, the process waits for ever. (The stacks
of both threads were seen with torch 2.13, under torchrun too; see pytorch/pytorch issue 56297.) This module therefore
holds a reference to each destroyed group that another Python object has one to, and drops it when none has. A model in
`DistributedDataParallel` has one as long as it lives, so what remains then is the reference from here.
"""

import atexit
import ctypes
import sys

import torch.distributed as dist
import torch.distributed.distributed_c10d as groups

_OWN_REFERENCES = 3
"""The list's, the loop variable's, and that of the argument of `sys.getrefcount`."""


class DestroyedGroups:
    """The process groups that were destroyed and may still be in use by C++ objects."""

    def __init__(self) -> None:
        self._groups: list[dist.ProcessGroup] = []
        atexit.register(self._keep_for_ever)

    def living_groups(self) -> list[dist.ProcessGroup]:
        """Return the process groups that are not destroyed."""
        return list(groups._world.pg_map)  # no public way to them

    def keep(self, were_living: list[dist.ProcessGroup]) -> None:
        """Keep the groups of the list that were destroyed since and are still in use. Drop those no longer in use.

        A group that nothing else uses must go at once: the other ranks find out when its connections close.
        """
        used = []
        for candidates in (self._groups, were_living):
            for group in candidates:
                if group not in groups._world.pg_map and sys.getrefcount(group) > _OWN_REFERENCES:
                    used.append(group)
        self._groups = used

    def _keep_for_ever(self) -> None:
        # The ending interpreter frees objects in any order, a model in `DistributedDataParallel` after this list too.
        for group in self._groups:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

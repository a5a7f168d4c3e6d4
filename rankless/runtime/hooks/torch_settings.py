"""Applies a worker's settings to torch when its script first imports torch.

Note [destructors of Gloo groups]: the destructor of a Gloo group waits for the group's threads to end. Such a thread
takes Python's global lock when it frees the tensors of its last collective. Python releases the lock while it drops
its own last reference to a group. `DistributedDataParallel` also has a reference, in C++, and holds the lock while it
drops that one. If this is the last one and a thread is about to take the lock, the process waits for ever. (The stacks
of both threads were seen with torch 2.13, under torchrun too; see pytorch/pytorch issue 56297.) `DestroyedGroups`
therefore holds a reference to each destroyed group that another Python object has one to, and drops it when none has. A
model in `DistributedDataParallel` has one as long as it lives, so what remains then is the reference from here.
"""

import atexit
import ctypes
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as groups
from torch.optim.optimizer import register_optimizer_step_post_hook

from rankless.config.run_config import Precision
from rankless.runtime.hooks.float64_mode import enter_float64_mode


def apply(
    *,
    seed: int | None,
    threads: int | None,
    dtype: Precision | None,
    before_teardown: Callable[[BaseException | None], None],
    on_step: Callable[..., None] | None = None,
) -> None:
    """Set threads, seed, dtype and debug level, and register two callbacks.

    Args:
        seed: The seed of torch's generators, or None to draw one.
        threads: How many threads torch's operators use, or None to leave that to torch.
        dtype: "float64" to compute in float64 throughout, or None to leave the dtype to the script.
        before_teardown: Called before the script destroys process groups, with the exception in flight.
        on_step: Called after each step of an optimizer.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if dtype is not None:
        # Jobs cast their own models and arguments. Other tensors of the script need the same dtype: an average of
        # parameters made before the first call, or the noise on which a script calls a model outside jobs.
        enter_float64_mode()
    if seed is not None:
        torch.manual_seed(seed)
    else:
        torch.seed()  # all forks of the fork server share the seed that torch drew when it was imported
    if on_step is not None:
        register_optimizer_step_post_hook(on_step)
    if dist.is_available():
        dist.set_debug_level_from_env()  # type: ignore[attr-defined]  # public, missing in the stubs
        _patch_destroy_process_group(before_teardown)


def _patch_destroy_process_group(before_teardown: Callable[[BaseException | None], None]) -> None:
    # A script may fail, destroy its group and clean up for a while. Its peers lose their connection at once, and its
    # own exception arrives much later. The agent finds the root cause only if this rank reports before it destroys.
    destroy = groups.destroy_process_group
    destroyed = DestroyedGroups()

    def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
        before_teardown(sys.exc_info()[1])
        living = destroyed.living_groups()
        destroy(group)
        group = None  # a reference from here would count as use
        destroyed.keep(living)

    destroy_process_group.__doc__ = destroy.__doc__
    destroy_process_group.__wrapped__ = destroy  # type: ignore[attr-defined]  # as functools.wraps does
    module: Any
    for module in (groups, dist):
        module.destroy_process_group = destroy_process_group


def find_original_destroy() -> Callable[..., None]:
    """Return PyTorch's own function that destroys process groups, without the report to the agent."""
    current: Callable[..., None] = dist.destroy_process_group
    return getattr(current, "__wrapped__", current)


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

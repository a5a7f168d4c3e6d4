"""Registers shared memory groups with `torch.distributed`, and makes and closes groups of a script's own."""

import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import _unregister_process_group

from rankless.collectives.backends.group_failure import Membership
from rankless.collectives.backends.process_group import BACKEND_NAME, SharedMemoryProcessGroup
from rankless.collectives.backends.shared_group import SharedGroup, open_shared_group


def register_backend() -> None:
    """Let `init_process_group`, `new_group` and device meshes make groups of the backend "shared_memory".

    A group that then cannot have shared memory, for example because its ranks are on several hosts, is one of Gloo. If
    the default group is in shared memory, new groups are too unless they name another backend.

    Example:
        >>> register_backend()
        >>> torch.distributed.is_backend_available("shared_memory")
        True
    """
    if BACKEND_NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND_NAME, _make_registered_group, extended_api=True, devices=["cpu"])


def _make_registered_group(options: Any, shared: SharedGroup | None) -> Any:
    """Return the group that torch then registers. `shared` is its memory if it has been opened before."""
    member = read_membership(options)
    opened = shared if isinstance(shared, SharedGroup) else open_shared_group(options.store, member, options.timeout)
    if isinstance(opened, SharedGroup):
        return SharedMemoryProcessGroup(options.store, member, opened, options.group_id)
    return make_gloo_group(options)


def read_membership(options: Any) -> Membership:
    """Return this process's place in a group that torch asks a registered backend for."""
    return Membership(
        rank=options.group_rank,
        # The default group has no list of ranks.
        global_ranks=tuple(options.global_ranks_in_group) or tuple(range(options.group_size)),
        timeout_seconds=options.timeout.total_seconds(),
    )


def make_gloo_group(options: Any) -> Any:
    """Return a Gloo group in place of one that a registered backend cannot make."""
    gloo: Any = dist.ProcessGroupGloo
    return gloo(options.store, options.group_rank, options.group_size, options.timeout)


def make_shared_memory_group(
    store: Any, rank: int, size: int, global_ranks: Sequence[int], timeout: timedelta
) -> SharedMemoryProcessGroup | None:
    """Make a process group of ranks of one host, whose collectives run in shared memory.

    All ranks of the group call this. `close_shared_memory_group` or `dist.destroy_process_group` closes it.

    Args:
        store: A `torch.distributed.Store` of the group's ranks, with keys that no earlier group has used.
        rank: This process's rank in the group.
        size: The number of ranks in the group.
        global_ranks: The ranks of the group as ranks of the job, in order.
        timeout: How long the ranks wait for each other, while the group is made and in its collectives.

    Returns:
        The group. None on all ranks if they are not on one host, `is_supported()` is false, or there is no memory.

    Raises:
        CollectiveError: A rank does not call this within the timeout, or its process has ended.

    Example:
        >>> store = torch.distributed.HashStore()
        >>> group = make_shared_memory_group(store, 0, 1, [0], timedelta(seconds=30))
        >>> torch.distributed.all_reduce(torch.ones(2), group=group)
        >>> close_shared_memory_group(group)
    """
    member = Membership(rank=rank, global_ranks=tuple(global_ranks[:size]), timeout_seconds=timeout.total_seconds())
    if rank == 0:
        store.set("group name", f"{BACKEND_NAME} {uuid.uuid4().hex}")
    shared = open_shared_group(store, member, timeout)
    if not isinstance(shared, SharedGroup):
        return None
    name = bytes(store.get("group name")).decode()
    group = SharedMemoryProcessGroup(store, member, shared, name)
    c10d._register_pg_in_world(
        group,
        backend_name=BACKEND_NAME,
        store=store,
        group_name=c10d.GroupName(name),
        backend_config=f"cpu:{BACKEND_NAME}",
        rank_mapping={global_rank: index for index, global_rank in enumerate(member.global_ranks)},
    )
    return group


def close_shared_memory_group(group: SharedMemoryProcessGroup) -> None:
    """Leave a group, release its memory, and unregister it from `torch.distributed`. A second call does nothing.

    Operations that are not done fail. Close a group after the last collective of all ranks.

    Args:
        group: A group of `make_shared_memory_group`.
    """
    group.shutdown()
    world = c10d._world
    name = world.pg_names.pop(group, None)
    for registry in (world.pg_map, world.pg_group_ranks, world.pg_backend_config, world.pg_coalesce_state):
        registry.pop(group, None)
    tag = world.pg_to_tag.pop(group, None)
    if tag is not None and group in world.tags_to_pg.get(tag, ()):
        world.tags_to_pg[tag].remove(group)
        if not world.tags_to_pg[tag]:
            del world.tags_to_pg[tag]
    if name is not None:
        _unregister_process_group(name)

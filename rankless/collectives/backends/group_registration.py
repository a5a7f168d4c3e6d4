"""Making a shared memory group, so that the functions of `torch.distributed` accept it, and closing it."""

import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import _unregister_process_group

from rankless.collectives.backends.group_failure import Membership
from rankless.collectives.backends.process_group import BACKEND_NAME, SharedMemoryProcessGroup
from rankless.collectives.backends.shared_group import open_shared_group


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
    if shared is None:
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

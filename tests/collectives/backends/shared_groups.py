"""Shared memory groups in the workers of `on_mesh`, and what a process holds open."""

import gc
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from rankless.collectives.backends import (
    SharedMemoryProcessGroup,
    close_shared_memory_group,
    make_shared_memory_group,
)
from rankless.parallel.mesh import Mesh
from rankless.torch_versions import find_objection_to_python_groups, find_torch_version

TIMEOUT_SECONDS = 30.0
_OBJECTION = find_objection_to_python_groups(find_torch_version())
NEEDS_SHARED_GROUPS = pytest.mark.skipif(bool(_OBJECTION), reason=f"shared memory: {_OBJECTION}")
"""For tests outside this folder: older versions of PyTorch have no such groups."""


def new_store(mesh: Mesh) -> Any:
    """Return a store that all workers share, with keys that nobody has used."""
    names = [uuid.uuid4().hex]
    dist.broadcast_object_list(names, src=0, group=mesh.group)
    return dist.PrefixStore(names[0], _get_default_store())


def make_group(mesh: Mesh, ranks: Sequence[int], timeout_seconds: float = TIMEOUT_SECONDS) -> Any:
    """Return a shared memory group of these workers; None in the other workers. All workers call this."""
    store = new_store(mesh)
    if mesh.rank not in ranks:
        return None
    timeout = timedelta(seconds=timeout_seconds)
    group = make_shared_memory_group(store, ranks.index(mesh.rank), len(ranks), ranks, timeout)
    assert isinstance(group, SharedMemoryProcessGroup)
    return group


@contextmanager
def shared_group(
    mesh: Mesh, ranks: Sequence[int] | None = None, timeout_seconds: float = TIMEOUT_SECONDS
) -> Iterator[Any]:
    """Make a group, and close it when all workers have left the block."""
    group = make_group(mesh, list(range(mesh.size)) if ranks is None else ranks, timeout_seconds)
    yield group
    dist.barrier(group=mesh.group)
    if group is not None:
        close_shared_memory_group(group)


def in_shared_memory(mesh: Mesh, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return `function(mesh, *arguments)`, where the mesh has a shared memory group of the same workers."""
    with shared_group(mesh) as group:
        return function(Mesh(rank=mesh.rank, size=mesh.size, device=mesh.device, group=group), *arguments)


def list_open() -> list[str]:
    """Return what this process holds for shared memory groups: descriptors, mappings, sockets and threads."""
    gc.collect()
    held, own_sockets = [], set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
        held += [target] if "rankless-" in target or "pidfd" in target else []
        if target.startswith("socket:["):
            own_sockets.add(target.removeprefix("socket:[").removesuffix("]"))
    maps = Path("/proc/self/maps").read_text().splitlines()
    held += [line.split(maxsplit=5)[-1] for line in maps if "rankless-" in line]
    sockets = Path("/proc/net/unix").read_text().splitlines()
    # The file lists the sockets of all processes. Its seventh column is the inode.
    held += [line.split()[-1] for line in sockets if "@rankless-" in line and line.split()[6] in own_sockets]
    held += [thread.name for thread in threading.enumerate() if thread.name.startswith("rankless-")]
    return sorted(held)

"""Hierarchical groups in the workers of `on_mesh`, which act as if they were on several hosts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rankless.collectives.backends.hosts import hosts_group as opening
from rankless.collectives.backends.hosts.process_group import register_hierarchical_backend
from rankless.parallel.mesh import Mesh

TIMEOUT_SECONDS = 30.0


@contextmanager
def acting_hosts(mesh: Mesh, hosts: str) -> Iterator[None]:
    """Within the block, new groups find each worker on the host that its letter names: "aab" has two hosts."""
    original = opening.find_host_name
    opening.find_host_name = lambda: hosts[mesh.rank]
    try:
        yield
    finally:
        opening.find_host_name = original


def make_group(
    mesh: Mesh, hosts: str, ranks: Sequence[int] | None = None, timeout_seconds: float = TIMEOUT_SECONDS
) -> Any:
    """Return a new group of the backend "hierarchical"; in workers outside it, torch's mark. All workers call this."""
    register_hierarchical_backend()
    with acting_hosts(mesh, hosts):
        return dist.new_group(
            list(range(mesh.size)) if ranks is None else list(ranks),
            backend="hierarchical",
            timeout=timedelta(seconds=timeout_seconds),
        )


@contextmanager
def hosts_group(
    mesh: Mesh, hosts: str, ranks: Sequence[int] | None = None, timeout_seconds: float = TIMEOUT_SECONDS
) -> Iterator[Any]:
    """Make a group, and destroy it when all workers have left the block. None in workers outside it."""
    group = make_group(mesh, hosts, ranks, timeout_seconds)
    is_member = group is not dist.GroupMember.NON_GROUP_MEMBER
    yield group if is_member else None
    dist.barrier(group=mesh.group)
    if is_member:
        dist.destroy_process_group(group)

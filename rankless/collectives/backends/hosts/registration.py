"""Registers groups on several hosts with `torch.distributed`."""

from typing import Any

import torch.distributed as dist

from rankless.collectives.backends.group_registration import make_gloo_group, read_membership
from rankless.collectives.backends.hosts.hosts_group import HostsGroup
from rankless.collectives.backends.hosts.opening import open_hosts_group
from rankless.collectives.backends.hosts.process_group import HIERARCHICAL, HierarchicalProcessGroup
from rankless.collectives.backends.process_group import SharedMemoryProcessGroup
from rankless.collectives.backends.shared_group import SharedGroup


def register_hierarchical_backend() -> None:
    """Let `init_process_group`, `new_group` and device meshes make groups of the backend "hierarchical".

    Such a group is one in shared memory if all its ranks are on one host, and one of Gloo if every host has one of
    them, or if a host has no memory to share. If the default group is hierarchical, new groups are too unless they name
    another backend.

    Example:
        >>> register_hierarchical_backend()
        >>> torch.distributed.is_backend_available("hierarchical")
        True
    """
    if HIERARCHICAL not in dist.Backend.backend_list:
        dist.Backend.register_backend(HIERARCHICAL, _make_registered_group, extended_api=True, devices=["cpu"])


def _make_registered_group(options: Any, opened: HostsGroup | None) -> Any:
    """Return the group that torch then registers. `opened` is what the default group runs in."""
    member = read_membership(options)
    found = opened if isinstance(opened, HostsGroup) else open_hosts_group(options.store, member, options.timeout)
    if isinstance(found, HostsGroup):
        return HierarchicalProcessGroup(options.store, member, found, options.group_id)
    if isinstance(found, SharedGroup):
        return SharedMemoryProcessGroup(options.store, member, found, options.group_id)
    return make_gloo_group(options)

"""A `torch.distributed` process group of ranks on several hosts, which reduce within each host first."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rankless.collectives.backends.argument_conversion import (
    flatten_bytes,
    require_dense,
    require_other_rank,
    write_back,
)
from rankless.collectives.backends.group_failure_errors import Membership
from rankless.collectives.backends.hosts.hosts_group import HostsGroup, open_hosts_group
from rankless.collectives.backends.process_group import SharedMemoryProcessGroup, make_gloo_instead, read_membership
from rankless.collectives.backends.shared_group import SharedGroup

HIERARCHICAL = "hierarchical"


class GlooMessage(dist.Work):
    """A message over Gloo. `wait` may be called again: Gloo's own work would wait for a further message.

    Args:
        work: Gloo's work.
        finish: Called once, when the message is done.
    """

    def __init__(self, work: Any, finish: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._work, self._finish = work, finish
        self._lock = threading.Lock()
        self._is_done = False
        self._source = -1

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the message is sent, or is there. Raises as Gloo does."""
        with self._lock:
            if not self._is_done:
                if timeout is None:
                    self._work.wait()
                else:
                    self._work.wait(timeout)
                if self._finish is not None:
                    self._finish()
                    self._source = int(self._work._source_rank())
                self._is_done = True
        return True

    def is_completed(self) -> bool:
        """Return whether the message is done, or has failed."""
        return self._is_done or bool(self._work.is_completed())

    def source_rank(self) -> int:
        """Return the sender of a received message, as a rank of the group; -1 for a sent one."""
        return self._source

    def _source_rank(self) -> int:
        return self._source


class HierarchicalProcessGroup(SharedMemoryProcessGroup):
    """A process group of ranks on several hosts, of which at least one has several ranks.

    It takes what `SharedMemoryProcessGroup` takes, and gives all ranks the same bits. Values are combined in the order
    of ranks within each host, and then in the order of hosts. Messages from rank to rank travel over Gloo.

    Args:
        store: The store through which the ranks met.
        member: This process's place in the group.
        hosts: The memory of this rank's host, and the connections to others. `shutdown` closes it.
        name: The name of the group, equal on all ranks.
    """

    def __init__(self, store: Any, member: Membership, hosts: HostsGroup, name: str) -> None:
        shared: Any = hosts  # it has the attributes that the base class uses
        super().__init__(store, member, shared, name)
        self._description = HIERARCHICAL
        self.must_be_abortable = hosts.must_be_abortable
        """Whether a rank must be able to end the group, and groups of some of its ranks, for all."""

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """For each host, the ranks of the group on it."""
        shared: Any = self._open
        hosts: tuple[tuple[int, ...], ...] = shared.layout.hosts
        return hosts

    def _open_again(self, store: Any, check: Callable[[], None]) -> Any:
        return open_hosts_group(store, replace(self._member, must_be_abortable=True), self.timeout, check=check)

    def send(self, tensors: Sequence[Tensor], dstRank: int, tag: int = 0) -> Any:
        """Begin to send a tensor to a rank of the group."""
        (tensor,) = tensors
        require_dense([tensor])
        require_other_rank(dstRank, self._member)
        return GlooMessage(self._gloo.send([_never_empty(flatten_bytes(tensor))], dstRank, tag))

    def recv(self, tensors: Sequence[Tensor], srcRank: int, tag: int = 0) -> Any:
        """Begin to receive a tensor from a rank of the group."""
        require_other_rank(srcRank, self._member)
        return self._begin_receive(tensors, lambda flat: self._gloo.recv([flat], srcRank, tag))

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Any:
        """Begin to receive a tensor from the first rank that sends one with the tag."""
        return self._begin_receive(tensors, lambda flat: self._gloo.recv_anysource([flat], tag))

    def _begin_receive(self, tensors: Sequence[Tensor], receive: Any) -> Any:
        (tensor,) = tensors
        require_dense([tensor])
        flat = flatten_bytes(tensor)
        return GlooMessage(receive(_never_empty(flat)), lambda: write_back(tensor, flat))

    @property
    def _gloo(self) -> Any:
        shared: Any = self._open
        return shared.messages

    def getBackendName(self) -> str:
        """Return the name of the backend to torch's C++ code."""
        return HIERARCHICAL


def _never_empty(flat: Tensor) -> Tensor:
    """Return the bytes, or one byte instead of none: Gloo does not tell the sender of an empty message."""
    return flat if len(flat) else flat.new_zeros(1)


def register_hierarchical_backend() -> None:
    """Let `init_process_group`, `new_group` and device meshes make groups of the backend "hierarchical".

    Such a group is one in shared memory if all its ranks are on one host, and one of Gloo if every host has one of
    them and no rank must be able to end it for all, or if a host has no memory to share. If the default group is
    hierarchical, new groups are too unless they name another backend.

    Example:
        >>> register_hierarchical_backend()
        >>> torch.distributed.is_backend_available("hierarchical")
        True
    """
    if HIERARCHICAL not in dist.Backend.backend_list:
        dist.Backend.register_backend(HIERARCHICAL, _make_registered_group, extended_api=True, devices=["cpu"])


def _make_registered_group(options: Any, opened: HostsGroup | None) -> Any:
    """Return the group that torch then registers. `opened` is what the default group runs in."""
    default = dist.group.WORLD
    is_abortable = isinstance(default, HierarchicalProcessGroup) and default.must_be_abortable
    member = replace(read_membership(options), must_be_abortable=is_abortable)
    found = opened if isinstance(opened, HostsGroup) else open_hosts_group(options.store, member, options.timeout)
    if isinstance(found, HostsGroup):
        return HierarchicalProcessGroup(options.store, member, found, options.group_id)
    if isinstance(found, SharedGroup):
        return SharedMemoryProcessGroup(options.store, member, found, options.group_id)
    return make_gloo_instead(options)

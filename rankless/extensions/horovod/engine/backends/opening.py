"""Opens the backend of a process set: the fastest one that its ranks, their hosts and the device allow."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rankless.collectives.backends.group_failure import Membership
from rankless.collectives.backends.hosts.hosts_group import HostsGroup
from rankless.collectives.backends.hosts.opening import open_hosts_group
from rankless.collectives.backends.hosts.process_group import HierarchicalProcessGroup
from rankless.collectives.backends.process_group import SharedMemoryProcessGroup
from rankless.collectives.backends.shared_group import NO_MEMORY, SharedGroup, open_shared_group
from rankless.config.shared_memory_support import Support
from rankless.extensions.horovod.engine.backends.process_group import ProcessGroupBackend, open_process_group
from rankless.extensions.horovod.engine.backends.shared_memory import SharedMemoryBackend

FLAT = "HOROVOD_HIERARCHICAL_ALLREDUCE=0"
Backend = SharedMemoryBackend | ProcessGroupBackend


@dataclass(frozen=True, kw_only=True)
class BackendRequest:
    """What the ranks of a process set need to know to open a backend together.

    Attributes:
        name: The process set and the kind of device, in words.
        store: A `torch.distributed.Store` with keys of its own for this backend.
        rank: This process's rank in the job.
        members: The ranks of the process set, in order.
        hosts: The host of each of them. Ranks of one host share memory.
        timeout: How long the ranks wait for each other, here and in each operation.
        watch: Called now and then during waits. It raises a `CollectiveError` if a peer is gone.
        reduces_by_hosts: Whether ranks of several hosts reduce within their hosts first.
    """

    name: str
    store: Any
    rank: int
    members: Sequence[int]
    hosts: Sequence[str]
    timeout: timedelta
    watch: Callable[[], None]
    reduces_by_hosts: bool

    @property
    def index(self) -> int:
        """The index of this rank in the process set."""
        return self.members.index(self.rank)

    def can_share_memory(self, device: torch.device) -> bool:
        """Whether two of the ranks have tensors in the memory of one host."""
        return device.type == "cpu" and len(set(self.hosts)) < len(self.members)

    @property
    def membership(self) -> Membership:
        """The place of this rank in the process set."""
        return Membership(
            rank=self.index,
            global_ranks=tuple(self.members),
            timeout_seconds=self.timeout.total_seconds(),
            timeout_name="HOROVOD_GLOO_TIMEOUT_SECONDS",
        )


def open_backend(request: BackendRequest, device: torch.device, *, notify: Callable[[str], None]) -> Backend:
    """Open the backend for a process set and a kind of device. All its ranks call this.

    `notify` is called on the first rank with the reason if a host has no memory to share.

    Raises:
        CollectiveError: A rank does not call this within the timeout, or is gone.
        RuntimeError: The ranks cannot connect to each other.
    """
    if request.can_share_memory(device):
        opened = _open_group(request)
        if isinstance(opened, SharedGroup | HostsGroup):
            return _make_backend(request, opened)
        is_known = FLAT in opened.reason or (opened is not NO_MEMORY and len(set(request.hosts)) == 1)
        if request.index == 0 and not is_known:
            notify(f"hvd: tensors on the CPU use Gloo instead of shared memory: {opened.reason}")
    return open_process_group(
        request.store, index=request.index, size=len(request.members), device=device, timeout=request.timeout
    )


def _open_group(request: BackendRequest) -> SharedGroup | HostsGroup | Support:
    store = dist.PrefixStore("shared memory", request.store)  # type: ignore[attr-defined]  # not in the stubs
    if len(set(request.hosts)) == 1:
        return open_shared_group(store, request.membership, request.timeout, check=request.watch)
    return open_hosts_group(
        store,
        request.membership,
        request.timeout,
        objection="" if request.reduces_by_hosts else FLAT,
        host=request.hosts[request.index],
        check=request.watch,
    )


def _make_backend(request: BackendRequest, opened: SharedGroup | HostsGroup) -> SharedMemoryBackend:
    opened.signals.watch = request.watch
    store, member, name = request.store, request.membership, request.name
    if isinstance(opened, HostsGroup):
        return SharedMemoryBackend(HierarchicalProcessGroup(store, member, opened, name))
    return SharedMemoryBackend(SharedMemoryProcessGroup(store, member, opened, name))

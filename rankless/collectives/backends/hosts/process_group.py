"""A `torch.distributed` process group of ranks on several hosts, which reduce within each host first."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rankless.collectives.backends.calls.call_arguments import require_dense, require_other_rank
from rankless.collectives.backends.calls.tensor_views import flatten_bytes, is_plain, write_back
from rankless.collectives.backends.group_failure import Membership
from rankless.collectives.backends.hosts.hosts_group import HostsGroup
from rankless.collectives.backends.process_group import SharedMemoryProcessGroup

HIERARCHICAL = "hierarchical"


class _StridedReceive(dist.Work):
    """A message for a tensor whose values do not lie one after the other. They are there after `wait`.

    Args:
        work: The message's work.
        tensor: The tensor.
        flat: Where the message arrives.
    """

    def __init__(self, work: Any, tensor: Tensor, flat: Tensor) -> None:
        super().__init__()
        self._work, self._tensor, self._flat = work, tensor, flat

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the message is there. Raises as Gloo does."""
        is_there: bool = self._work.wait() if timeout is None else self._work.wait(timeout)
        write_back(self._tensor, self._flat)
        return is_there

    def is_completed(self) -> bool:
        """Return whether the message has arrived, or has failed."""
        return bool(self._work.is_completed())

    def _source_rank(self) -> int:
        return int(self._work._source_rank())


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

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """For each host, the ranks of the group on it."""
        shared: Any = self._open
        hosts: tuple[tuple[int, ...], ...] = shared.layout.hosts
        return hosts

    def send(self, tensors: Sequence[Tensor], dstRank: int, tag: int = 0) -> Any:
        """Begin to send a tensor to a rank of the group."""
        (tensor,) = tensors
        require_dense([tensor])
        require_other_rank(dstRank, self._member)
        return self._gloo.send([flatten_bytes(tensor)], dstRank, tag)

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
        work = receive(flat)
        return work if is_plain(tensor) else _StridedReceive(work, tensor, flat)

    @property
    def _gloo(self) -> Any:
        shared: Any = self._open
        return shared.messages

    def getBackendName(self) -> str:
        """Return the name of the backend to torch's C++ code."""
        return HIERARCHICAL

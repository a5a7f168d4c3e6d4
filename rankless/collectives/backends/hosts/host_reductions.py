"""all_reduce, reduce and reduce_scatter of ranks on several hosts.

Note [within hosts first]: each host reduces in shared memory into its first rank. The first ranks combine their hosts'
values, and copy the result to their hosts. Values are combined in the order of ranks within a host, and then in the
order of hosts. An average is a sum that the first ranks divide.

Note [pieces]: a long tensor is cut into pieces. While one is on its way between hosts, each host copies the result of
the piece before to its ranks, and reduces the next. All ranks of a host do so in the same order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from rankless.collectives.backends.hosts.host_waits import HostWaits
from rankless.collectives.backends.hosts.leader_exchange import LeaderExchange, as_bytes, count_piece_bytes
from rankless.collectives.backends.hosts.ranks_of_hosts import RanksOfHosts
from rankless.collectives.backends.reductions import Reduction
from rankless.collectives.backends.shared_group import SharedGroup
from rankless.collectives.backends.slots import split_rounds


@dataclass(frozen=True)
class HostReduction:
    """A reduction over several hosts: how values are combined, and whether the ranks then divide by their number."""

    combination: Reduction
    is_average: bool


class HostReductions:
    """The reductions of one group on several hosts, with the methods of `SharedReductions`.

    All tensors are flat and contiguous. All methods raise `CollectiveError` if another rank ends, aborts or is late;
    the group cannot be used afterwards.

    Args:
        layout: The hosts of the group.
        waits: How long to wait.
        local: The shared memory of this rank's host; None for a rank that is alone on its host.
        leaders: Connects the first ranks of the hosts; None for other ranks.
    """

    def __init__(
        self, layout: RanksOfHosts, waits: HostWaits, *, local: SharedGroup | None, leaders: LeaderExchange | None
    ) -> None:
        self._layout, self._waits, self._local, self._leaders = layout, waits, local, leaders
        self._piece_bytes = count_piece_bytes(len(layout.hosts))
        self.rank, self.size = layout.rank, layout.size
        self._reductions: dict[tuple[Any, torch.dtype], HostReduction] = {}

    def get_reduction(self, operation: Any, dtype: torch.dtype) -> HostReduction:
        """Return the reduction for a `ReduceOp` and a dtype. Raises `ConfigError` if there is none."""
        key = (getattr(operation, "op", operation), dtype)
        if key not in self._reductions:
            combination = Reduction(operation, dtype)
            is_average = combination.is_average
            if is_average:
                combination = Reduction(ReduceOp.SUM, dtype)
            self._reductions[key] = HostReduction(combination, is_average)
        return self._reductions[key]

    def all_reduce(self, tensor: Tensor, reduction: HostReduction) -> None:
        """Replace the values by their reduction over all ranks. See notes [within hosts first] and [pieces]."""
        before = None
        for start, end in split_rounds(len(tensor), self._piece_bytes // tensor.element_size()):
            piece = tensor[start:end]
            self._reduce_within_host(piece, reduction)
            started = None
            if self._leaders is not None:
                started = self._leaders.start_all_reduce(piece, reduction.combination, self._wait)
            if before is not None:
                self._finish_piece(*before, reduction)
            before = piece, started
        if before is not None:
            self._finish_piece(*before, reduction)

    def _finish_piece(self, piece: Tensor, started: Callable[[], None] | None, reduction: HostReduction) -> None:
        if started is not None:
            started()
            self._divide(piece, reduction)
        self._copy_within_host(piece)

    def reduce(self, tensor: Tensor, reduction: HostReduction, root: int) -> None:
        """Replace the values of rank `root` by their reduction over all ranks. Other ranks keep theirs."""
        self.all_reduce(tensor if self.rank == root else tensor.clone(), reduction)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], reduction: HostReduction) -> None:
        """Reduce `inputs[r]` over all ranks for each rank r, into its `output`. The inputs may differ in length."""
        blocks = [torch.cat([inputs[rank] for rank in members]) for members in self._layout.hosts]
        values = torch.cat(blocks)
        if not len(values):
            return
        self._reduce_within_host(values, reduction)
        own = values.split([len(block) for block in blocks])[self._layout.host]
        if self._leaders is not None:
            finish = self._leaders.start_reduce_scatter(
                values.split([len(block) for block in blocks]), reduction.combination, self._wait
            )
            finish()
            self._divide(own, reduction)
        self._copy_within_host(own)
        members = self._layout.members
        parts = own.split([len(inputs[rank]) for rank in members])
        output.copy_(parts[members.index(self.rank)])

    def _reduce_within_host(self, values: Tensor, reduction: HostReduction) -> None:
        if self._local is not None:
            with self._waits.wait_for_host():
                self._local.reductions.reduce(values, reduction.combination, 0)

    def _copy_within_host(self, values: Tensor) -> None:
        if self._local is not None:
            with self._waits.wait_for_host(graces=2):
                self._local.movement.broadcast(as_bytes(values), 0)

    def _divide(self, values: Tensor, reduction: HostReduction) -> None:
        if reduction.is_average:
            values.div_(self.size)

    def _wait(self, work: Any) -> None:
        assert self._leaders is not None
        self._waits.wait_for_hosts(self._leaders.exchange, work, members_wait=True)

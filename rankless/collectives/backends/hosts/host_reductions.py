"""all_reduce, reduce and reduce_scatter of ranks on several hosts.

Note [within hosts first]: each host reduces in shared memory into its first rank. The first ranks combine their hosts'
values, and copy the result to their hosts. Values are combined in the order of ranks within a host, and then in the
order of hosts. An average is a sum that the first ranks divide. For x_k, the values of rank k, and hosts 0, 1, …:

    h_i = x_a + x_b + …      the ranks a < b < … of host i, in its memory
    y = h_0 + h_1 + …        the first ranks, over the network
    every rank has y         in the memory of each host

So the network carries the values of one rank for each host, whatever the number of its ranks.

Note [one call]: the first step within a host has the signature of the whole call. The first rank compares those of its
host's ranks, and then, with the other first ranks, those of the hosts. No rank returns before that.

Note [pieces]: a long tensor is cut into pieces. While one is on its way between hosts, each host copies the result of
the piece before to its ranks, and reduces the next. All ranks of a host do so in the same order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from rankless.collectives.backends.double_buffered_slots import split_rounds
from rankless.collectives.backends.hosts.host_waits import HostWaits
from rankless.collectives.backends.hosts.leader_exchange import (
    INLINE_BYTES,
    LeaderExchange,
    as_bytes,
    count_piece_bytes,
)
from rankless.collectives.backends.hosts.ranks_of_hosts import RanksOfHosts
from rankless.collectives.backends.operation_signature import Collective, fold_lengths, sign_reduction
from rankless.collectives.backends.reductions import Reduction
from rankless.collectives.backends.shared_group import SharedGroup


@dataclass(frozen=True)
class HostReduction:
    """A reduction over several hosts: its number, and how values are combined. An average is then divided."""

    number: int
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
        self._agreement = HostAgreement(waits, local=local, leaders=leaders)
        self._piece_bytes = count_piece_bytes(len(layout.hosts))
        self.rank, self.size = layout.rank, layout.size
        self._reductions: dict[tuple[Any, torch.dtype], HostReduction] = {}

    def get_reduction(self, operation: Any, dtype: torch.dtype) -> HostReduction:
        """Return the reduction for a `ReduceOp` and a dtype. Raises `ConfigError` if there is none."""
        key = (getattr(operation, "op", operation), dtype)
        if key not in self._reductions:
            whole = Reduction(operation, dtype)
            combination = Reduction(ReduceOp.SUM, dtype) if whole.is_average else whole
            self._reductions[key] = HostReduction(whole.number, combination, whole.is_average)
        return self._reductions[key]

    def all_reduce(self, tensor: Tensor, reduction: HostReduction) -> None:
        """Replace the values by their reduction over all ranks. See notes [within hosts first] and [pieces]."""
        signature = sign_reduction(Collective.ALL_REDUCE, len(tensor), reduction.number, tensor.dtype)
        self._all_reduce(tensor, reduction, signature)

    def _all_reduce(self, tensor: Tensor, reduction: HostReduction, signature: int) -> None:
        """Do it as the call with this signature. See note [one call]."""
        if not len(tensor):
            self._agreement.agree(signature)
            return
        is_inline = tensor.nbytes <= INLINE_BYTES
        before = None
        for start, end in split_rounds(len(tensor), self._piece_bytes // tensor.element_size()):
            piece = tensor[start:end]
            self._reduce_within_host(piece, reduction, signature if start == 0 else None)
            started = None
            if self._leaders is not None:
                if start == 0 and not is_inline:
                    self._leaders.compare(signature, self._agreement.wait)
                started = self._leaders.start_all_reduce(
                    piece, reduction.combination, self._agreement.wait, signature if is_inline else None
                )
            if before is not None:
                self._finish_piece(*before, reduction)
            before = piece, started
        if before is not None:
            self._finish_piece(*before, reduction)

    def _finish_piece(self, piece: Tensor, started: Callable[[], None] | None, reduction: HostReduction) -> None:
        if started is not None:
            started()
            self._divide(piece, reduction)
        self._agreement.copy_within_host(as_bytes(piece))

    def reduce(self, tensor: Tensor, reduction: HostReduction, root: int) -> None:
        """Replace the values of rank `root` by their reduction over all ranks. Other ranks keep theirs."""
        signature = sign_reduction(Collective.REDUCE, len(tensor), reduction.number, tensor.dtype, root)
        self._all_reduce(tensor if self.rank == root else tensor.clone(), reduction, signature)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], reduction: HostReduction) -> None:
        """Reduce `inputs[r]` over all ranks for each rank r, into its `output`. The inputs may differ in length."""
        count = fold_lengths(list(map(len, inputs)))
        signature = sign_reduction(Collective.REDUCE_SCATTER, count, reduction.number, output.dtype)
        lengths = [sum(len(inputs[rank]) for rank in members) for members in self._layout.hosts]
        values = torch.cat([inputs[rank] for members in self._layout.hosts for rank in members])
        if not len(values):
            self._agreement.agree(signature)
            return
        self._reduce_within_host(values, reduction, signature)
        blocks = values.split(lengths)
        own = blocks[self._layout.host]
        if self._leaders is not None:
            is_inline = max(lengths) * values.element_size() <= INLINE_BYTES
            if not is_inline:
                self._leaders.compare(signature, self._agreement.wait)
            self._leaders.start_reduce_scatter(
                blocks, reduction.combination, self._agreement.wait, signature if is_inline else None
            )()
            self._divide(own, reduction)
        if len(own):
            self._agreement.copy_within_host(as_bytes(own))
        else:
            self._agreement.release()
        members = self._layout.members
        parts = own.split([len(inputs[rank]) for rank in members])
        output.copy_(parts[members.index(self.rank)])

    def _reduce_within_host(self, values: Tensor, reduction: HostReduction, signature: int | None) -> None:
        if self._local is not None:
            with self._waits.wait_for_host():
                self._local.reductions.reduce(values, reduction.combination, 0, signature=signature)

    def _divide(self, values: Tensor, reduction: HostReduction) -> None:
        if reduction.is_average:
            values.div_(self.size)


class HostAgreement:
    """The steps by which all ranks of a group find out that they make the same call.

    Args:
        waits: How long to wait.
        local: The shared memory of this rank's host; None for a rank that is alone on its host.
        leaders: Connects the first ranks of the hosts; None for other ranks.
    """

    def __init__(self, waits: HostWaits, *, local: SharedGroup | None, leaders: LeaderExchange | None) -> None:
        self._waits, self._local, self._leaders = waits, local, leaders

    def agree(self, signature: int) -> None:
        """Return when all ranks have made the call. Raises `CollectiveError` on all if a rank makes another."""
        self.compare_within_host(signature)
        if self._leaders is not None:
            self._leaders.compare(signature, self.wait)
        self.release()

    def compare_within_host(self, signature: int) -> None:
        """Let the first rank of this host compare the calls of the host's ranks. The others do not wait for it."""
        if self._local is not None:
            with self._waits.wait_for_host():
                self._local.movement.compare_calls(signature)

    def release(self) -> None:
        """Return when the first rank of this host calls this: it knows then that all hosts make the call."""
        self.copy_within_host(torch.zeros(1, dtype=torch.uint8, device="cpu"))

    def copy_within_host(self, data: Tensor, root: int = 0, *, graces: int = 2) -> None:
        """Copy the bytes of one of this host's ranks to the others. See note [times of a collective] for the graces."""
        if self._local is not None:
            with self._waits.wait_for_host(graces):
                self._local.movement.broadcast(data, root)

    def wait(self, work: Any) -> None:
        """Wait for other hosts while all ranks of this host wait for the result."""
        assert self._leaders is not None
        self._waits.wait_for_hosts(self._leaders.exchange, work, members_wait=True)

"""broadcast, all_gather and the other collectives that move values between ranks of several hosts.

What a host's ranks have in common travels once between hosts, from first rank to first rank. What is for one rank goes
to it directly, over connections between all ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rankless.collectives.backends.hosts.gloo_exchange import GlooExchange
from rankless.collectives.backends.hosts.host_waits import HostWaits
from rankless.collectives.backends.hosts.leader_exchange import LeaderExchange
from rankless.collectives.backends.hosts.ranks_of_hosts import RanksOfHosts
from rankless.collectives.backends.shared_group import SharedGroup


class HostMovement:
    """The collectives of one group on several hosts that combine no values, with the methods of `SharedMovement`.

    All tensors are flat, contiguous and of dtype uint8. All methods raise `CollectiveError` if another rank ends,
    aborts or is late; the group cannot be used afterwards.

    Args:
        layout: The hosts of the group.
        waits: How long to wait.
        local: The shared memory of this rank's host; None for a rank that is alone on its host.
        leaders: Connects the first ranks of the hosts; None for other ranks.
        everyone: Connects all ranks.
    """

    def __init__(
        self,
        layout: RanksOfHosts,
        waits: HostWaits,
        *,
        local: SharedGroup | None,
        leaders: LeaderExchange | None,
        everyone: GlooExchange,
    ) -> None:
        self._layout, self._waits, self._local = layout, waits, local
        self._leaders, self._everyone = leaders, everyone
        self.rank, self.size = layout.rank, layout.size

    def barrier(self) -> None:
        """Return when all ranks have called this."""
        if self._local is not None:
            with self._waits.wait_for_host():
                self._local.movement.barrier()
        if self._leaders is not None:
            self._leaders.barrier(self._wait_as_leader)
        if self._local is not None:
            with self._waits.wait_for_host(graces=2):
                self._local.movement.barrier()

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Copy the bytes of rank `root` to all ranks."""
        if not len(tensor):
            return
        host = self._layout.find_host(root)
        if self._layout.host == host:
            self._copy_within_host(tensor, self._layout.members.index(root), graces=0)
        if self._leaders is not None:
            # The other ranks of the root's host may have gone on, and may have ended.
            members_wait = self._layout.host != host
            self._leaders.broadcast(tensor, host, lambda work: self._wait_as_leader(work, members_wait=members_wait))
        if self._layout.host != host:
            self._copy_within_host(tensor, 0, graces=2)

    def all_gather(self, value: Tensor, outputs: Sequence[Tensor]) -> None:
        """Copy each rank's bytes into all ranks' `outputs[rank]`. Ranks may have different numbers of bytes."""
        hosts, own_host = self._layout.hosts, self._layout.host
        own_outputs = [outputs[rank] for rank in hosts[own_host]]
        if self._local is not None:
            with self._waits.wait_for_host():
                self._local.movement.all_gather(value, own_outputs)
        elif outputs[self.rank].data_ptr() != value.data_ptr():
            outputs[self.rank].copy_(value)
        counts = [sum(len(outputs[rank]) for rank in members) for members in hosts]
        if self._leaders is not None:
            blocks = self._leaders.all_gather(torch.cat(own_outputs), counts, self._wait_as_leader)
        else:
            blocks = [torch.empty(count, dtype=torch.uint8) for count in counts]
        for host, (members, block) in enumerate(zip(hosts, blocks, strict=True)):
            if host != own_host and len(block):
                self._copy_within_host(block, 0, graces=2)
                for rank, part in zip(members, block.split([len(outputs[rank]) for rank in members]), strict=True):
                    outputs[rank].copy_(part)

    def gather(self, value: Tensor, outputs: Sequence[Tensor] | None, root: int) -> None:
        """Copy each rank's bytes, equally many, into `outputs[rank]` of rank `root`. The others' outputs are None."""
        nothing = [value[:0]] * self.size
        outgoing = [value if rank == root else value[:0] for rank in range(self.size)]
        self._exchange(outgoing, nothing if outputs is None else outputs)

    def scatter(self, output: Tensor, values: Sequence[Tensor] | None, root: int) -> None:
        """Copy `values[rank]` of rank `root`, all equally long, to each rank's output. The others' values are None."""
        incoming = [output if rank == root else output[:0] for rank in range(self.size)]
        self._exchange([output[:0]] * self.size if values is None else values, incoming)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Copy `inputs[j]` of rank i to `outputs[i]` of rank j. Lengths may differ, and may be 0."""
        self._exchange(inputs, outputs)

    def _exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """Send a tensor to each rank and receive one from each, over connections between all ranks."""
        sent, received = torch.cat(list(outgoing)), torch.empty(sum(map(len, incoming)), dtype=torch.uint8)
        counts = list(map(len, outgoing)), list(map(len, incoming))
        work = self._everyone.start(sent, counts[0], received, counts[1])
        self._waits.wait_for_hosts(self._everyone, work, members_wait=False)
        for target, part in zip(incoming, received.split(counts[1]), strict=True):
            target.copy_(part)

    def _copy_within_host(self, data: Tensor, root: int, *, graces: int) -> None:
        if self._local is not None:
            with self._waits.wait_for_host(graces):
                self._local.movement.broadcast(data, root)

    def _wait_as_leader(self, work: Any, *, members_wait: bool = True) -> None:
        assert self._leaders is not None
        self._waits.wait_for_hosts(self._leaders.exchange, work, members_wait=members_wait)

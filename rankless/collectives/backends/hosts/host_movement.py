"""broadcast, all_gather and the other collectives that move values between ranks of several hosts.

What a host's ranks have in common travels once between hosts, from first rank to first rank. What is for one rank goes
to it directly, over connections between all ranks. The ranks compare their calls before they return: see note [one
call] in `host_reductions`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rankless.collectives.backends.hosts.gloo_exchange import GlooExchange
from rankless.collectives.backends.hosts.host_reductions import HostAgreement
from rankless.collectives.backends.hosts.host_waits import HostWaits
from rankless.collectives.backends.hosts.leader_exchange import CallExchange, LeaderExchange
from rankless.collectives.backends.hosts.ranks_of_hosts import RanksOfHosts
from rankless.collectives.backends.operation_signature import Collective, encode_signature, fold_lengths
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
        self._calls = CallExchange(everyone, waits.member.global_ranks)
        self._agreement = HostAgreement(waits, local=local, leaders=leaders)
        self.rank, self.size = layout.rank, layout.size

    def barrier(self) -> None:
        """Return when all ranks have called this."""
        self._agreement.agree(encode_signature(Collective.BARRIER))

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Copy the bytes of rank `root` to all ranks."""
        signature = encode_signature(Collective.BROADCAST, count=len(tensor), root=root)
        if not len(tensor):
            self._agreement.agree(signature)
            return
        self._agreement.compare_within_host(signature)
        host = self._layout.find_host(root)
        if self._layout.host == host:
            self._agreement.copy_within_host(tensor, self._layout.members.index(root), graces=0)
        if self._leaders is not None:
            self._leaders.broadcast(tensor, host, self._agreement.wait, signature)
        if self._layout.host == host:
            self._agreement.release()
        else:
            self._agreement.copy_within_host(tensor)

    def all_gather(self, value: Tensor, outputs: Sequence[Tensor]) -> None:
        """Copy each rank's bytes into all ranks' `outputs[rank]`. Ranks may have different numbers of bytes."""
        hosts, own_host = self._layout.hosts, self._layout.host
        own_outputs = [outputs[rank] for rank in hosts[own_host]]
        signature = encode_signature(Collective.ALL_GATHER, count=fold_lengths(list(map(len, outputs))))
        if not any(map(len, own_outputs)):
            self._agreement.compare_within_host(signature)
        elif self._local is not None:
            with self._waits.wait_for_host():
                self._local.movement.all_gather(value, own_outputs, signature=signature)
        elif outputs[self.rank].data_ptr() != value.data_ptr():
            outputs[self.rank].copy_(value)
        counts = [sum(len(outputs[rank]) for rank in members) for members in hosts]
        if self._leaders is not None:
            blocks = self._leaders.all_gather(torch.cat(own_outputs), counts, self._agreement.wait, signature)
        else:
            blocks = [torch.empty(count, dtype=torch.uint8, device="cpu") for count in counts]
        for host, (members, block) in enumerate(zip(hosts, blocks, strict=True)):
            if host != own_host and len(block):
                self._agreement.copy_within_host(block)
                for rank, part in zip(members, block.split([len(outputs[rank]) for rank in members]), strict=True):
                    outputs[rank].copy_(part)
        if sum(counts) == counts[own_host]:
            self._agreement.release()

    def gather(self, value: Tensor, outputs: Sequence[Tensor] | None, root: int) -> None:
        """Copy each rank's bytes, equally many, into `outputs[rank]` of rank `root`. The others' outputs are None."""
        signature = encode_signature(Collective.GATHER, count=len(value), root=root)
        nothing = [value[:0]] * self.size
        outgoing = [value if rank == root else value[:0] for rank in range(self.size)]
        self._exchange(signature, outgoing, nothing if outputs is None else outputs)

    def scatter(self, output: Tensor, values: Sequence[Tensor] | None, root: int) -> None:
        """Copy `values[rank]` of rank `root`, all equally long, to each rank's output. The others' values are None."""
        signature = encode_signature(Collective.SCATTER, count=len(output), root=root)
        incoming = [output if rank == root else output[:0] for rank in range(self.size)]
        outgoing = [output[:0]] * self.size if values is None else values
        self._exchange(signature, outgoing, incoming)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Copy `inputs[j]` of rank i to `outputs[i]` of rank j. Lengths may differ, and may be 0."""
        self._exchange(encode_signature(Collective.ALL_TO_ALL), inputs, outputs)

    def _exchange(self, signature: int, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """Send a tensor to each rank and receive one from each, over connections between all ranks.

        The first ranks also compare the calls over their own connections: some ranks may make a call that does not use
        these ones. They begin here only then, because Gloo's group may wait for its timeout in its destructor if its
        connections end just after an operation has begun.
        """
        self._agreement.compare_within_host(signature)
        if self._leaders is not None:
            self._leaders.compare(signature, self._wait_briefly)
        counts = list(map(len, incoming))
        found = self._calls.start(signature, outgoing, counts)(self._wait_for_everyone)
        incoming[self.rank].copy_(outgoing[self.rank])
        if found is None:
            found = self._exchange_long(
                [data if peer != self.rank else data[:0] for peer, data in enumerate(outgoing)],
                [count if peer != self.rank else 0 for peer, count in enumerate(counts)],
            )
        for peer, (target, part) in enumerate(zip(incoming, found, strict=True)):
            if peer != self.rank:
                target.copy_(part)

    def _exchange_long(self, outgoing: Sequence[Tensor], incoming_counts: Sequence[int]) -> list[Tensor]:
        """Send bytes to each rank, and return those from each, whose numbers are known."""
        received = torch.empty(sum(incoming_counts), dtype=torch.uint8, device="cpu")
        counts = list(map(len, outgoing))
        self._wait_for_everyone(self._everyone.start(torch.cat(list(outgoing)), counts, received, incoming_counts))
        return list(received.split(list(incoming_counts)))

    def _wait_for_everyone(self, work: Any) -> None:
        self._waits.wait_for_hosts(self._everyone, work, members_wait=False)

    def _wait_briefly(self, work: Any) -> None:
        """Wait for other hosts while the ranks of this host may finish the call, and may end."""
        assert self._leaders is not None
        self._waits.wait_for_hosts(self._leaders.exchange, work, members_wait=False)

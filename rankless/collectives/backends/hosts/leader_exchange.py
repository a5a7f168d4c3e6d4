"""Collectives of one rank of each host, by exchanges of bytes between them.

Note [pairs and shares]: two hosts, and few bytes, are exchanged whole: each host sends its values to all others, and
combines all hosts' values. Otherwise each host combines a share of the values, and sends its result to the others.
Values are combined in the order of hosts, so all hosts get the same bits. Gloo's own reductions take fewer dtypes.

Note [calls]: the first exchange of a call has its signature (see note [headers]). A method that is
given a signature makes that exchange: with its bytes if they are few, else before them.

Note [headers]: a message starts with the signature of the call, the number of bytes for its receiver, and whether its
sender has many bytes for a rank. Every rank of the exchange sends one to each other. The memory for a message has the
same size for all calls, because Gloo ends a process that receives more bytes than it expects. So calls that differ
reach each other, and all ranks raise the same error. Few bytes travel behind the header. If a rank has more, all bytes
follow in an exchange of their own, once the calls are compared.
"""

import functools
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rankless.collectives.backends.double_buffered_slots import split_shares
from rankless.collectives.backends.group_failure_errors import make_mismatch_error
from rankless.collectives.backends.hosts.gloo_exchange import GlooExchange
from rankless.collectives.backends.operation_signature import describe_signature
from rankless.collectives.backends.reductions import Reduction

PIECE_BYTES = 1 << 19


INLINE_BYTES = 64 << 10
"""The most bytes that travel with the header of their call."""
_HEADER = struct.Struct("=qqq")
_HEADER_BYTES = _HEADER.size
_CAPACITY_BYTES = _HEADER_BYTES + INLINE_BYTES
Wait = Callable[[Any], None]


class CallExchange:
    """The comparison of the calls of ranks on several hosts. See note [headers].

    Args:
        exchange: Connects the ranks.
        names: The ranks that it connects, as errors name them.
    """

    def __init__(self, exchange: GlooExchange, names: Sequence[int]) -> None:
        self.exchange = exchange
        self.rank, self.size = exchange.rank, exchange.size
        self._names = names
        self._capacities = [0 if peer == self.rank else _CAPACITY_BYTES for peer in range(self.size)]
        self._incoming = torch.empty(sum(self._capacities), dtype=torch.uint8, device="cpu")
        self._headers = memoryview(self._incoming.numpy())  # type: ignore[arg-type]  # numpy's stubs for Python 3.11
        # Where the bytes of each rank begin, behind their header. This rank's own place is never read.
        starts = [sum(self._capacities[:peer]) for peer in range(self.size)]
        self._offsets = [0 if peer == self.rank else start + _HEADER_BYTES for peer, start in enumerate(starts)]

    def start(
        self, signature: int, outgoing: Sequence[Tensor], incoming_counts: Sequence[int]
    ) -> Callable[[Wait], list[Tensor] | None]:
        """Begin to tell the other ranks of a call, and to send them those bytes that are at most `INLINE_BYTES`.

        Args:
            signature: The call.
            outgoing: The bytes for each rank; this rank's own are ignored.
            incoming_counts: How many bytes each rank has for this one.

        Returns:
            A function that waits, and raises `CollectiveError` on all ranks if the calls differ. It returns what each
            rank has sent, in memory that the next call uses again. This rank's own part means nothing. It returns None
            on all ranks if a rank has more bytes for another: then nothing may be used.
        """
        is_long = any(data.nbytes > INLINE_BYTES for data in outgoing)
        messages, counts = [], []
        for peer, data in enumerate(outgoing):
            if peer == self.rank:
                counts.append(0)
                continue
            byte_count = data.nbytes
            messages.append(_make_header(signature, byte_count, is_long))
            if byte_count and not is_long:
                messages.append(data)
            counts.append(_HEADER_BYTES + (0 if is_long else byte_count))
        sent = torch.cat(messages) if len(messages) > 1 else messages[0]
        work = self.exchange.start(sent, counts, self._incoming, self._capacities)

        def finish(wait: Wait) -> list[Tensor] | None:
            wait(work)
            if self._require_same_call(signature, incoming_counts) or is_long:
                return None
            return [
                self._incoming[offset : offset + count]
                for offset, count in zip(self._offsets, incoming_counts, strict=True)
            ]

        return finish

    def compare(self, signature: int, wait: Wait) -> None:
        """Return when all ranks have made a call. Raises `CollectiveError` on all if a rank makes another."""
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.start(signature, [nothing] * self.size, [0] * self.size)(wait)

    def _require_same_call(self, signature: int, incoming_counts: Sequence[int]) -> bool:
        """Compare this rank's call with those that it has received. Returns whether a rank has long messages."""
        headers = [
            (signature, incoming_counts[peer], 0)
            if peer == self.rank
            else _HEADER.unpack_from(self._headers, offset - _HEADER_BYTES)
            for peer, offset in enumerate(self._offsets)
        ]
        self._require_same([sent for sent, _, _ in headers])
        for peer, (_, byte_count, _) in enumerate(headers):
            if byte_count != incoming_counts[peer]:
                self._refuse_length(peer, byte_count, incoming_counts[peer])
        return any(is_long for _, _, is_long in headers)

    def _require_same(self, signatures: Sequence[int]) -> None:
        """Raise the same `CollectiveError` on all ranks unless their calls are equal: about the first in a minority."""
        if len(set(signatures)) == 1:
            return
        usual = Counter(signatures).most_common(1)[0][0]
        odd = next(peer for peer, signature in enumerate(signatures) if signature != usual)
        raise make_mismatch_error(
            self._names[odd],
            self._names[signatures.index(usual)],
            found=describe_signature(signatures[odd]),
            own=describe_signature(usual),
        )

    def _refuse_length(self, peer: int, found: int, own: int) -> None:
        name, own_name = self._names[peer], self._names[self.rank]
        raise make_mismatch_error(
            name, own_name, found=f"it sends {found} bytes to rank {own_name}", own=f"receives {own} bytes from it"
        )


@functools.lru_cache(maxsize=1024)
def _make_header(signature: int, byte_count: int, is_long: bool) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor([signature, byte_count, is_long], dtype=torch.int64, device="cpu").view(torch.uint8)


WHOLE_BYTES = INLINE_BYTES
"""The most bytes that more than two hosts exchange whole."""


class LeaderExchange:
    """The collectives of the first ranks of the hosts.

    All tensors are flat and contiguous. The methods raise what `wait` raises.

    Args:
        exchange: Connects the first ranks, in the order of hosts.
        names: The first ranks, as errors name them.
    """

    def __init__(self, exchange: GlooExchange, names: Sequence[int]) -> None:
        self.exchange = exchange
        self.host, self.host_count = exchange.rank, exchange.size
        self._calls = CallExchange(exchange, names)

    def compare(self, signature: int, wait: Wait) -> None:
        """Return when all hosts have made the call. Raises `CollectiveError` if a host makes another."""
        self._calls.compare(signature, wait)

    def start_all_reduce(
        self, values: Tensor, reduction: Reduction, wait: Wait, signature: int | None
    ) -> Callable[[], None]:
        """Begin to replace the values by their reduction over all hosts. See note [pairs and shares].

        Args:
            values: The values of this host.
            reduction: How they are combined.
            wait: Waits for an exchange.
            signature: The call, for at most `INLINE_BYTES` of values. None if the hosts have compared it.

        Returns:
            What to call for the result. Until then the values must not change.
        """
        if signature is not None:
            return self._start_first(signature, [as_bytes(values)] * self.host_count, values, reduction, wait)
        if self.host_count > 2 and values.nbytes > WHOLE_BYTES:
            return self._start_shares(values, reduction, wait)
        work, found = self._send_to_all(values)

        def finish() -> None:
            wait(work)
            reduction.reduce([values if value is None else value for value in found], values)

        return finish

    def _start_shares(self, values: Tensor, reduction: Reduction, wait: Wait) -> Callable[[], None]:
        shares = [values[first:last] for first, last in split_shares(len(values), self.host_count)]
        finish_own = self.start_reduce_scatter(shares, reduction, wait)

        def finish() -> None:
            finish_own()
            own = as_bytes(shares[self.host])
            gathered = self.all_gather(own, [share.nbytes for share in shares], wait)
            for host, share in enumerate(shares):
                if host != self.host:
                    as_bytes(share).copy_(gathered[host])

        return finish

    def _send_to_all(self, values: Tensor) -> tuple[Any, list[Tensor | None]]:
        counts = [0 if host == self.host else values.nbytes for host in range(self.host_count)]
        outgoing = as_bytes(values)
        if self.host_count > 2:
            outgoing = outgoing.repeat(self.host_count - 1)
        incoming = torch.empty(sum(counts), dtype=torch.uint8, device="cpu")
        work = self.exchange.start(outgoing, counts, incoming, counts)
        parts = [part.view(values.dtype) for part in incoming.split(counts)]
        return work, [None if host == self.host else part for host, part in enumerate(parts)]

    def _start_first(
        self, signature: int, outgoing: Sequence[Tensor], own: Tensor, reduction: Reduction, wait: Wait
    ) -> Callable[[], None]:
        """Begin to reduce this host's values over all hosts, in the first exchange of a call."""
        finish_call = self._calls.start(signature, outgoing, [own.nbytes] * self.host_count)

        def finish() -> None:
            parts = finish_call(wait)
            assert parts is not None
            if len(own):
                found = [own if host == self.host else part.view(own.dtype) for host, part in enumerate(parts)]
                reduction.reduce(found, own)

        return finish

    def start_reduce_scatter(
        self, blocks: Sequence[Tensor], reduction: Reduction, wait: Wait, signature: int | None = None
    ) -> Callable[[], None]:
        """Begin to replace this host's block by the reduction of all hosts' values for it.

        With a signature each block has at most `INLINE_BYTES`. Returns as above.
        """
        if signature is not None:
            sent = [as_bytes(block) for block in blocks]
            return self._start_first(signature, sent, blocks[self.host], reduction, wait)
        own = blocks[self.host]
        outgoing_counts = [0 if host == self.host else block.nbytes for host, block in enumerate(blocks)]
        incoming_counts = [0 if host == self.host else own.nbytes for host in range(self.host_count)]
        outgoing = torch.cat([as_bytes(block) for host, block in enumerate(blocks) if host != self.host])
        incoming = torch.empty(sum(incoming_counts), dtype=torch.uint8, device="cpu")
        if not len(outgoing) and not len(incoming):
            return lambda: None
        work = self.exchange.start(outgoing, outgoing_counts, incoming, incoming_counts)

        def finish() -> None:
            wait(work)
            if len(own):
                found = [part.view(own.dtype) for part in incoming.split(incoming_counts)]
                found[self.host] = own
                reduction.reduce(found, own)

        return finish

    def all_gather(
        self, own: Tensor, byte_counts: Sequence[int], wait: Wait, signature: int | None = None
    ) -> list[Tensor]:
        """Return the bytes of each host, given their numbers; this host's are its own tensor."""
        if signature is not None and max(byte_counts) <= INLINE_BYTES:
            parts = self._calls.start(signature, [own] * self.host_count, byte_counts)(wait)
            assert parts is not None
            parts[self.host] = own
            return parts
        if signature is not None:
            self.compare(signature, wait)
        incoming_counts = [0 if host == self.host else count for host, count in enumerate(byte_counts)]
        outgoing_counts = [0 if host == self.host else len(own) for host in range(self.host_count)]
        incoming = torch.empty(sum(incoming_counts), dtype=torch.uint8, device="cpu")
        outgoing = own.repeat(self.host_count - 1) if self.host_count > 2 else own
        if len(outgoing) or len(incoming):
            wait(self.exchange.start(outgoing, outgoing_counts, incoming, incoming_counts))
        found = list(incoming.split(incoming_counts))
        found[self.host] = own
        return found

    def broadcast(self, data: Tensor, root: int, wait: Wait, signature: int) -> None:
        """Copy the bytes of host `root` to all hosts."""
        if len(data) <= INLINE_BYTES:
            outgoing = [data if self.host == root else data[:0]] * self.host_count
            counts = [len(data) if host == root != self.host else 0 for host in range(self.host_count)]
            parts = self._calls.start(signature, outgoing, counts)(wait)
            assert parts is not None
            if self.host != root:
                data.copy_(parts[root])
            return
        self.compare(signature, wait)
        if self.host_count > 2 and len(data) > WHOLE_BYTES:
            self._broadcast_shares(data, root, wait)
            return
        self._send_from(root, [data] * self.host_count, wait)

    def _broadcast_shares(self, data: Tensor, root: int, wait: Wait) -> None:
        """Send a share to each host, which sends it to all others: the root's network carries the data once."""
        parts = iter(split_shares(len(data), self.host_count - 1))
        shares = [data[:0] if host == root else data[slice(*next(parts))] for host in range(self.host_count)]
        self._send_from(root, shares, wait)
        own = shares[self.host]
        takes = [host not in (root, self.host) and self.host != root for host in range(self.host_count)]
        outgoing_counts = [len(own) if take else 0 for take in takes]
        incoming_counts = [len(share) if take else 0 for take, share in zip(takes, shares, strict=True)]
        incoming = torch.empty(sum(incoming_counts), dtype=torch.uint8, device="cpu")
        wait(self.exchange.start(own.repeat(sum(takes)), outgoing_counts, incoming, incoming_counts))
        for share, take, found in zip(shares, takes, incoming.split(incoming_counts), strict=True):
            if take:
                share.copy_(found)

    def _send_from(self, root: int, shares: Sequence[Tensor], wait: Wait) -> None:
        none, counts = torch.empty(0, dtype=torch.uint8, device="cpu"), [0] * self.host_count
        if self.host != root:
            incoming_counts = [len(shares[self.host]) if host == root else 0 for host in range(self.host_count)]
            wait(self.exchange.start(none, counts, shares[self.host], incoming_counts))
            return
        others = [share for host, share in enumerate(shares) if host != root]
        outgoing_counts = [0 if host == root else len(share) for host, share in enumerate(shares)]
        wait(self.exchange.start(torch.cat(others) if len(others) > 1 else others[0], outgoing_counts, none, counts))


def count_piece_bytes(host_count: int) -> int:
    """Return the most bytes of one all_reduce of so many hosts. Shares of many hosts stay long enough."""
    return PIECE_BYTES * max(1, host_count // 2)


def as_bytes(values: Tensor) -> Tensor:
    """Return flat values as flat bytes."""
    return values if values.dtype is torch.uint8 else values.view(torch.uint8)

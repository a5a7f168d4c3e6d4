"""The first exchange of each call between hosts. It tells each rank what the others call.

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

from rankless.collectives.backends.group_failure import make_mismatch_error
from rankless.collectives.backends.hosts.gloo_exchange import GlooExchange
from rankless.collectives.backends.operation_signature import describe_signature

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

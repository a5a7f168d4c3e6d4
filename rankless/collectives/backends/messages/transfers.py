"""The messages of one rank that are on their way, and how sends and receives match.

Note [messages]: a message is a header, its tag and its length, and its bytes. The sender puts messages into the ring
to the receiver one after the other, as fast as there is space. A small message is sent when it is in the ring, even if
nobody receives it yet. The receiver reads the ring of a rank only while it waits for a message from it. A message
whose tag nobody waits for is read into memory of its own, so that the messages behind it can arrive.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from rankless.collectives.backends.messages.rings import MessageRing
from rankless.collectives.backends.operation_queue import SharedMemoryWork

_HEADER_BYTES = 16


@dataclass(eq=False)
class Transfer:
    """A message that this rank sends or receives.

    Attributes:
        work: What the caller waits for.
        tag: Only a send and a receive with the same tag match.
        data: The bytes, flat and contiguous, uint8.
        source: The rank that it must come from. None: any.
        finish: Called when a received message is in `data`.
    """

    work: SharedMemoryWork
    tag: int
    data: torch.Tensor
    source: int | None = None
    finish: Callable[[], None] | None = None


@dataclass(eq=False)
class _Arriving:
    """A message on its way in: where its bytes go, how many are there, and the receive that it belongs to."""

    tag: int
    data: torch.Tensor
    receive: Transfer | None = None
    count: int = 0


@dataclass(eq=False)
class _Source:
    """The messages from one rank: the ring, the message that is arriving, and those that nobody waits for."""

    ring: MessageRing
    current: _Arriving | None = None
    unclaimed: deque[_Arriving] = field(default_factory=deque)


@dataclass(eq=False)
class _Target:
    """The messages to one rank: the ring, the sends, and how much of the first one is sent, header included."""

    ring: MessageRing
    sends: deque[Transfer] = field(default_factory=deque)
    count: int = 0

    @property
    def can_move(self) -> bool:
        """Whether a part of the first send fits into the ring. A header is never divided."""
        return bool(self.sends) and self.ring.space >= (1 if self.count else _HEADER_BYTES)


class LengthMismatch(ValueError):
    """A message has another length than the tensor that receives it. `rank` is the sender."""

    def __init__(self, rank: int, sent: int, expected: int) -> None:
        super().__init__(f"{sent} bytes sent, {expected} expected")
        self.rank, self.sent, self.expected = rank, sent, expected


class MessageTransfers:
    """The messages of one rank that are not done. The caller holds a lock around all calls.

    Args:
        incoming: The rings from the other ranks, by rank.
        outgoing: The rings to the other ranks, by rank.
        wake: Called with a rank whose ring has been read or written.
    """

    def __init__(
        self, incoming: Mapping[int, MessageRing], outgoing: Mapping[int, MessageRing], wake: Callable[[int], None]
    ) -> None:
        self._sources = {rank: _Source(ring) for rank, ring in incoming.items()}
        self._targets = {rank: _Target(ring) for rank, ring in outgoing.items()}
        self._receives: list[Transfer] = []
        self._done: list[Transfer] = []
        self._wake = wake

    @property
    def is_busy(self) -> bool:
        """Whether there is a message that is not done."""
        return bool(self._receives) or any(
            source.current is not None and source.current.receive is not None for source in self._sources.values()
        ) or any(target.sends for target in self._targets.values())  # fmt: skip

    @property
    def can_move(self) -> bool:
        """Whether `move` would do something."""
        return any(target.can_move for target in self._targets.values()) or any(
            source.ring.length and self._is_read(rank) for rank, source in self._sources.items()
        )

    @property
    def awaited(self) -> list[set[int]]:
        """The ranks that each message waits for. One of each set must live."""
        sets = [{rank} for rank, target in self._targets.items() if target.sends]
        sets += [{*self._sources} if receive.source is None else {receive.source} for receive in self._receives]
        return sets + [{rank} for rank, source in self._sources.items() if source.current and source.current.receive]

    def add_send(self, transfer: Transfer, target: int) -> None:
        """Send a message after all others to the same rank."""
        self._targets[target].sends.append(transfer)

    def add_receive(self, transfer: Transfer) -> None:
        """Receive the first message that matches.

        Raises:
            LengthMismatch: It is here already, and has another length.
        """
        ranks = list(self._sources) if transfer.source is None else [transfer.source]
        for rank in ranks:
            source = self._sources[rank]
            for message in source.unclaimed:
                if message.tag == transfer.tag:
                    source.unclaimed.remove(message)
                    self._deliver(message, transfer, rank)
                    return
            current = source.current
            if current is not None and current.receive is None and current.tag == transfer.tag:
                current.receive = transfer
                return
        self._receives.append(transfer)

    def move(self) -> bool:
        """Move all bytes that can be moved now. Returns whether there were any.

        Raises:
            LengthMismatch: A message has another length than its receive expects.
        """
        moved = [self._move_out(rank) for rank, target in self._targets.items() if target.sends]
        moved += [self._move_in(rank) for rank in self._sources if self._is_read(rank)]
        return any(moved)

    def take_done(self) -> list[Transfer]:
        """Return the transfers that are done, each once."""
        done, self._done = self._done, []
        return done

    def remove_all(self) -> list[Transfer]:
        """Forget all messages that are not done, and return them."""
        removed, self._receives = self._receives, []
        for target in self._targets.values():
            removed += target.sends
            target.sends.clear()
        for source in self._sources.values():
            removed += [source.current.receive] if source.current and source.current.receive else []
            source.current = None
        return removed

    def _is_read(self, rank: int) -> bool:
        current = self._sources[rank].current
        if current is not None and current.receive is not None:
            return True
        return any(receive.source is None or receive.source == rank for receive in self._receives)

    def _move_out(self, rank: int) -> bool:
        target, has_moved = self._targets[rank], False
        while target.can_move:
            transfer = target.sends[0]
            if target.count == 0:
                header = torch.tensor([transfer.tag, len(transfer.data)], dtype=torch.int64, device="cpu")
                target.count = target.ring.write(header.view(torch.uint8))
            target.count += target.ring.write(transfer.data[target.count - _HEADER_BYTES :])
            has_moved = True
            if target.count < _HEADER_BYTES + len(transfer.data):
                break
            self._done.append(target.sends.popleft())
            target.count = 0
        if has_moved:
            self._wake(rank)
        return has_moved

    def _move_in(self, rank: int) -> bool:
        source, has_moved = self._sources[rank], False
        while self._is_read(rank):
            if source.current is None:
                if source.ring.length < _HEADER_BYTES:
                    break
                header = torch.empty(_HEADER_BYTES, dtype=torch.uint8, device="cpu")
                source.ring.read(header)
                tag, byte_count = header.view(torch.int64).tolist()
                source.current = self._match(rank, tag, byte_count)
                has_moved = True
            current = source.current
            count = source.ring.read(current.data[current.count :])
            current.count += count
            has_moved = has_moved or count > 0
            if current.count < len(current.data):
                break
            source.current = None
            if current.receive is None:
                source.unclaimed.append(current)
            else:
                self._deliver(current, current.receive, rank)
        if has_moved:
            self._wake(rank)
        return has_moved

    def _match(self, rank: int, tag: int, byte_count: int) -> _Arriving:
        """Return where a message goes whose header has arrived."""
        for receive in self._receives:
            if receive.tag == tag and receive.source in (None, rank):
                self._receives.remove(receive)
                if byte_count != len(receive.data):
                    self._receives.insert(0, receive)
                    raise LengthMismatch(rank, byte_count, len(receive.data))
                return _Arriving(tag, receive.data, receive)
        return _Arriving(tag, torch.empty(byte_count, dtype=torch.uint8, device="cpu"))

    def _deliver(self, message: _Arriving, receive: Transfer, rank: int) -> None:
        """Complete a receive with a message that has arrived."""
        if len(message.data) != len(receive.data):
            self._receives.append(receive)
            raise LengthMismatch(rank, len(message.data), len(receive.data))
        if message.data is not receive.data:
            receive.data.copy_(message.data)
        if receive.finish is not None:
            receive.finish()
        receive.work.source = rank
        self._done.append(receive)

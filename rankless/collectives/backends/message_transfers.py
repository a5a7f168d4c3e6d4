"""send, recv and recv_anysource between the ranks of a group, matched by sender and tag.

Note [who moves messages]: a thread that waits for its message moves all messages of its rank, out and in. While none
waits and messages are not done, the group's message thread does. See note [messages].

Note [messages]: a message is a header, its tag and its length, and its bytes. The sender puts messages into the ring
to the receiver one after the other, as fast as there is space. A small message is sent when it is in the ring, even if
nobody receives it yet. The receiver reads the ring of a rank only while it waits for a message from it. A message
whose tag nobody waits for is read into memory of its own, so that the messages behind it can arrive.

Note [rings]: each ordered pair of ranks has a ring buffer of bytes in the memory of the group. The sender counts the
bytes that it has written, the receiver those that it has read. The difference is what the ring holds. Bytes are written
before they are counted, and read before they are counted as read.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from rankless.collectives.backends.futex_signals import BACKGROUND_MARKER, MESSAGE_CHANNEL, GroupSignals
from rankless.collectives.backends.operation_queue import SharedMemoryWork
from rankless.errors import CollectiveError
from rankless.records.group_failure_codes import WORD_BYTES, FailureKind

Result = TypeVar("Result")


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


_COUNTER_BYTES = 128
_ALL_RINGS_BYTES = 4 << 20
_SMALLEST_RING_BYTES = 16 << 10
_LARGEST_RING_BYTES = 512 << 10


@dataclass(frozen=True)
class RingLayout:
    """Where the rings of a group with `size` ranks lie, in bytes from the start of their memory."""

    size: int

    @property
    def ring_bytes(self) -> int:
        """The bytes that a ring can hold, a power of two."""
        share = _ALL_RINGS_BYTES // max(1, self.size * (self.size - 1))
        return min(_LARGEST_RING_BYTES, max(_SMALLEST_RING_BYTES, 1 << (share.bit_length() - 1)))

    @property
    def byte_count(self) -> int:
        """The bytes of all rings and their counters."""
        return self.size * self.size * (2 * _COUNTER_BYTES + self.ring_bytes)

    def start(self, sender: int, receiver: int) -> int:
        """The first byte of a ring's counters. Its data follow."""
        return (sender * self.size + receiver) * (2 * _COUNTER_BYTES + self.ring_bytes)


class MessageRing:
    """The ring from one rank to another.

    Args:
        memory: The memory of all rings, a flat uint8 tensor.
        words: The same memory as 64-bit words.
        layout: Where the rings lie.
        sender: The rank that writes.
        receiver: The rank that reads.
    """

    def __init__(
        self, memory: torch.Tensor, words: memoryview, layout: RingLayout, *, sender: int, receiver: int
    ) -> None:
        start = layout.start(sender, receiver)
        self._words, self._capacity = words, layout.ring_bytes
        self._written = start // WORD_BYTES
        self._read = (start + _COUNTER_BYTES) // WORD_BYTES
        self._data = memory[start + 2 * _COUNTER_BYTES :][: layout.ring_bytes]

    @property
    def space(self) -> int:
        """How many bytes can be written."""
        return self._capacity - self.length

    @property
    def length(self) -> int:
        """How many bytes can be read."""
        return int(self._words[self._written] - self._words[self._read])

    def write(self, data: torch.Tensor) -> int:
        """Write as many of the bytes as there is space for, and return their number."""
        count = min(self.space, len(data))
        written = self._words[self._written]
        place = written % self._capacity
        until_end = min(count, self._capacity - place)
        if until_end:
            self._data[place : place + until_end].copy_(data[:until_end])
        if count > until_end:
            self._data[: count - until_end].copy_(data[until_end:count])
        self._words[self._written] = written + count
        return count

    def read(self, target: torch.Tensor) -> int:
        """Read as many bytes as there are and the target takes, and return their number."""
        count = min(self.length, len(target))
        read = self._words[self._read]
        place = read % self._capacity
        until_end = min(count, self._capacity - place)
        if until_end:
            target[:until_end].copy_(self._data[place : place + until_end])
        if count > until_end:
            target[until_end:count].copy_(self._data[: count - until_end])
        self._words[self._read] = read + count
        return count


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


class PointToPoint:
    """The messages of one rank of a group.

    Args:
        signals: Connects the ranks.
        make_ring: Returns the ring from one rank, the first argument, to another.
    """

    def __init__(self, signals: GroupSignals, make_ring: Callable[[int, int], MessageRing]) -> None:
        self._signals, rank = signals, signals.rank
        peers = [peer for peer in range(signals.size) if peer != rank]
        self._transfers = MessageTransfers(
            {peer: make_ring(peer, rank) for peer in peers},
            {peer: make_ring(rank, peer) for peer in peers},
            signals.wake_receiver,
        )
        self._moving = threading.Lock()
        self._state = threading.Condition()
        self._waiting = 0
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def send(self, data: torch.Tensor, target: int, tag: int) -> SharedMemoryWork:
        """Begin to send bytes.

        Args:
            data: Flat and contiguous, uint8. It must not change until the work is done.
            target: The receiver, another rank of the group.
            tag: Only a receive with this tag matches.

        Returns:
            The work. Its `wait` raises `CollectiveError` if the receiver ends or the group fails.
        """
        transfer = Transfer(SharedMemoryWork([data], self._drive), tag, data)
        return self._begin(transfer, lambda: self._transfers.add_send(transfer, target))

    def receive(
        self, data: torch.Tensor, source: int | None, tag: int, finish: Callable[[], None] | None = None
    ) -> SharedMemoryWork:
        """Begin to receive bytes.

        Args:
            data: Where to put them: flat and contiguous, uint8.
            source: The sender, another rank of the group. None: any; `work.source_rank()` is then the sender.
            tag: Only a message with this tag matches.
            finish: Called when the bytes are there.

        Returns:
            The work. Its `wait` raises `CollectiveError` if the sender ends, sends another length, or the group fails.
        """
        transfer = Transfer(SharedMemoryWork([data], self._drive), tag, data, source, finish)
        return self._begin(transfer, lambda: self._transfers.add_receive(transfer))

    def close(self) -> None:
        """End the thread, after the group's signals are closed. Messages that are not done fail."""
        with self._state:
            self._is_closed = True
            self._state.notify_all()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._attempt(self._signals.check)

    def _begin(self, transfer: Transfer, add: Callable[[], None]) -> SharedMemoryWork:
        """Add a message, move what can be moved now, and let the thread do the rest unless the caller waits."""
        self._signals.check()
        self._attempt(lambda: self._run_locked(add))
        self._attempt(self._move)
        if not transfer.work.is_done:
            with self._state:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._serve, name="rankless-messages", daemon=True)
                    self._thread.start()
                self._state.notify_all()
        return transfer.work

    def _drive(self, work: SharedMemoryWork, deadline: float | None) -> None:
        """Move messages until one of them is done, or until a point in time."""

        def is_enough() -> bool:
            return work.is_done or (deadline is not None and time.monotonic() >= deadline)

        with self._state:
            self._waiting += 1
        try:
            while not is_enough():
                self._attempt(lambda: self._move_or_sleep(is_enough, fails_late=True))
        finally:
            with self._state:
                self._waiting -= 1
                self._state.notify_all()

    def _serve(self) -> None:
        torch.set_grad_enabled(False)
        while True:
            with self._state:
                self._state.wait_for(lambda: self._is_closed or (self._transfers.is_busy and not self._waiting))
                if self._is_closed:
                    return
            self._attempt(lambda: self._move_or_sleep(lambda: self._waiting > 0 or self._is_closed, fails_late=False))

    def _move_or_sleep(self, is_enough: Callable[[], bool], *, fails_late: bool) -> None:
        """Move messages; sleep until one can move if none can."""
        if self._move() or is_enough():
            return
        self._signals.sleep_until(
            lambda: self._transfers.can_move or is_enough(),
            channel=MESSAGE_CHANNEL,
            marker=self._find_marker() if fails_late else BACKGROUND_MARKER,
            awaited=lambda: self._transfers.awaited,
            fails_late=fails_late,
        )

    def _find_marker(self) -> int:
        """Return the mark of a rank that this one waits for."""
        return min((min(ranks) + 1 for ranks in self._transfers.awaited if ranks), default=BACKGROUND_MARKER)

    def _move(self) -> bool:
        """Move what can be moved now. Returns whether anything was."""
        return self._run_locked(self._transfers.move)

    def _run_locked(self, action: Callable[[], Result]) -> Result:
        """Do something with the transfers, and finish those that are done afterwards."""
        try:
            with self._moving:
                return action()
        finally:
            with self._moving:
                done = self._transfers.take_done()
            for transfer in done:
                transfer.work.finish()

    def _attempt(self, action: Callable[[], object]) -> None:
        """Do something. If it fails, all messages that are not done fail."""
        try:
            action()
        except LengthMismatch as mismatch:
            names = self._signals.member.global_ranks
            self._signals.end_group(FailureKind.MISMATCH, self._signals.rank)
            error = CollectiveError(
                expected=f"rank {names[mismatch.rank]} to send rank {names[self._signals.rank]} a message of "
                f"{mismatch.expected} bytes",
                found=f"{mismatch.sent} bytes",
                fix="make sender and receiver agree on shape, dtype and tag; create a new group to continue",
            )
            self._fail(error)
        except CollectiveError as error:
            self._fail(error)
        except BaseException:
            # The ring may hold a part of a message, or a part twice.
            self._signals.end_group(FailureKind.INTERRUPTED, self._signals.rank)
            raise

    def _fail(self, error: CollectiveError) -> None:
        with self._moving:
            failed = self._transfers.remove_all()
        for transfer in failed:
            # The frames of a traceback would keep the group's memory.
            transfer.work.finish(error.with_traceback(None))

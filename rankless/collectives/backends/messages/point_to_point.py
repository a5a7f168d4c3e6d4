"""send, recv and recv_anysource between the ranks of a group, matched by sender and tag.

Note [who moves messages]: a thread that waits for its message moves all messages of its rank, out and in. While none
waits and messages are not done, the group's message thread does. See note [messages] in `transfers`.
"""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from rankless.collectives.backends.messages.rings import MessageRing
from rankless.collectives.backends.messages.transfers import LengthMismatch, MessageTransfers, Transfer
from rankless.collectives.backends.operation_queue import SharedMemoryWork
from rankless.collectives.backends.signals import BACKGROUND_MARKER, MESSAGE_CHANNEL, GroupSignals
from rankless.errors import CollectiveError
from rankless.records.group_failures import FailureKind

Result = TypeVar("Result")


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

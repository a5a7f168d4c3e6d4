"""How the ranks of a group wait for each other: counters in shared memory, sleep, timeout, and the end of the group.

Note [phases]: each rank counts the phases of all its collectives, and posts the number of the last one that it has
reached. All ranks run the same collectives in the same order, so equal numbers mean equal phases. Waiting for a rank
means waiting until its number is large enough.

Note [sleep]: a rank that has looked often enough writes into its own sleeper word what it waits for, looks again, and
sleeps on that word. A rank that posts looks at the sleeper words of the others. If one waits for it, it sets the word
to 0 and wakes the sleeper. No wake is lost: either the sleeper sees the new number, or the poster sees the word, or
the kernel sees that the word has changed. A store and a later load of another word may be swapped by the processor,
so a lock is taken in between, which no processor moves them across.

Where the words of a group's control block lie. The block is at the start of the group's shared memory.

The block starts with the word that ends the group, and a mark. A part for each rank follows. Words of different
writers are on different cache lines, two lines apart because processors fetch lines in pairs.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rankless.collectives.backends.group_failure_errors import Membership, make_error, make_forked_error
from rankless.collectives.backends.peer_liveness import PeerProcesses
from rankless.config.available_cpu_and_memory import core_count
from rankless.records.group_failure_codes import (
    FAILURE_OFFSET,
    GROUP_MARK,
    MARK_OFFSET,
    WORD_BYTES,
    FailureKind,
    encode_failure,
)

COLLECTIVE_CHANNEL, MESSAGE_CHANNEL = 0, 1
BACKGROUND_MARKER = 1 << 20
"""In the sleeper word of a rank whose thread waits for messages, while the script goes on."""
SLICE_SECONDS = 0.05
"""The longest sleep before a rank looks whether the others are alive."""
_CHECK_SECONDS = 0.02
SPIN_COUNT = 1500
"""How often a rank looks before it sleeps, at most. It looks less often after it has looked in vain."""
CROWDED_SPIN_COUNT = 20
"""The same if there are more ranks than cores, and the least."""
_PROBE_INTERVAL = 32
_FAILURE = FAILURE_OFFSET // WORD_BYTES


LINE_WORDS = 16
CHANNELS = 2
"""Collectives sleep on one word of their rank, messages from one rank to another on a second."""


@dataclass(frozen=True)
class ControlLayout:
    """The offsets of the control block of a group with `size` ranks, in words of 8 bytes."""

    size: int

    @property
    def table_words(self) -> int:
        """The words that a rank publishes about a call: its signature, a number, and a number for each rank."""
        return _round_up(2 + self.size)

    @property
    def rank_words(self) -> int:
        """The words of one rank."""
        return (1 + CHANNELS) * LINE_WORDS + 2 * self.table_words

    @property
    def word_count(self) -> int:
        """The words of the whole block."""
        return LINE_WORDS + self.size * self.rank_words

    @property
    def byte_count(self) -> int:
        """The bytes of the whole block."""
        return WORD_BYTES * self.word_count

    def posted(self, rank: int) -> int:
        """The word with the number of the last phase that a rank has reached. The rank writes it."""
        return LINE_WORDS + rank * self.rank_words

    def closed(self, rank: int) -> int:
        """The word that is not 0 after a rank has closed the group. The rank writes it."""
        return self.posted(rank) + 1

    def sleeper(self, rank: int, channel: int) -> int:
        """The word on which a rank sleeps. It sets what it waits for; the rank that wakes it sets 0."""
        return self.posted(rank) + (1 + channel) * LINE_WORDS

    def table(self, rank: int, half: int) -> int:
        """The first word of what a rank publishes about the call that uses this half of its slot."""
        return self.posted(rank) + (1 + CHANNELS) * LINE_WORDS + half * self.table_words


def _round_up(words: int) -> int:
    return -(-words // LINE_WORDS) * LINE_WORDS


_WAIT, _WAKE, _EVERY_WAITER = 0, 1, 0x7FFFFFFF
_NANOSECONDS = 1_000_000_000
_WORDS = ctypes.c_long * 2  # struct timespec


class Futex:
    """The two operations of a futex, on words at given addresses.

    Args:
        number: The number of the system call `futex`.
    """

    def __init__(self, number: int) -> None:
        arguments: list[Any] = [
            *(ctypes.c_long, ctypes.c_void_p, ctypes.c_long, ctypes.c_ulong),
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ulong),
        ]
        self._number = number
        self._sleep = ctypes.CDLL(None).syscall
        # Waking is short. Without the interpreter's lock it could take 5 ms to get it back from a busy thread.
        self._wake = ctypes.PyDLL(None).syscall
        self._sleep.argtypes = self._wake.argtypes = arguments

    def wait(self, address: int, expected: int, timeout_seconds: float) -> None:
        """Sleep until `wake` is called for the address, a signal arrives, or the timeout has passed.

        Args:
            address: The address of a 32-bit word.
            expected: Returns at once if the word has another value.
            timeout_seconds: The longest sleep.
        """
        nanoseconds = max(0, int(timeout_seconds * _NANOSECONDS))
        time = _WORDS(nanoseconds // _NANOSECONDS, nanoseconds % _NANOSECONDS)
        self._sleep(self._number, address, _WAIT, expected, ctypes.addressof(time), None, 0)

    def wake(self, address: int) -> None:
        """Wake every thread of every process that sleeps on the word at the address."""
        self._wake(self._number, address, _WAKE, _EVERY_WAITER, None, None, 0)


class GroupSignals:
    """What one rank tells the other ranks of its group, and what it waits for.

    Args:
        words: The control block as 64-bit words, mapped by all ranks.
        address: The address of the first word.
        layout: Where the words lie.
        member: This process's place in the group.
        peers: The processes of the other ranks. `close` closes them.
        futex: The system call.
    """

    def __init__(
        self,
        words: memoryview,
        address: int,
        layout: ControlLayout,
        *,
        member: Membership,
        peers: PeerProcesses,
        futex: Futex,
    ) -> None:
        self.words, self.layout = words, layout
        self._address, self._peers, self._futex = address, peers, futex
        self.member, self.rank, self.size = member, member.rank, member.size
        self._limit_seconds = member.timeout_seconds
        self._process_id = os.getpid()
        rank = member.rank
        self.phase = 0
        self.is_closed = False
        others = [peer for peer in range(layout.size) if peer != rank]
        self._posted = [(peer, layout.posted(peer)) for peer in others]
        self._sleepers = [layout.sleeper(peer, COLLECTIVE_CHANNEL) for peer in others]
        self._own_posted = layout.posted(rank)
        self._longest_spin = SPIN_COUNT if layout.size <= core_count() else CROWDED_SPIN_COUNT
        self._spin_count = self._longest_spin
        self._vain_spins = 0
        self._fence = threading.Lock()
        self.watch: Callable[[], None] | None = None
        """Called now and then while a collective sleeps. It raises if the wait is in vain."""
        words[MARK_OFFSET // WORD_BYTES] = GROUP_MARK

    def post(self) -> int:
        """Tell the other ranks that this rank has reached its next phase, and return the phase's number."""
        self.phase += 1
        words, marker = self.words, self.rank + 1
        words[self._own_posted] = self.phase
        with self._fence:
            pass
        for sleeper in self._sleepers:
            if words[sleeper] == marker:
                self._wake(sleeper)
        return self.phase

    def wait_for_all(self, phase: int) -> None:
        """Return when all ranks have posted a phase.

        Raises:
            CollectiveError: A rank has ended, closed or aborted the group, or does not post within the timeout.
        """
        words = self.words
        for peer, posted in self._posted:
            if words[posted] < phase:
                self._wait_for_peer(peer, posted, phase)

    def wait_for(self, rank: int, phase: int) -> None:
        """Return when one rank has posted a phase. Raises as `wait_for_all`."""
        posted = self.layout.posted(rank)
        if rank != self.rank and self.words[posted] < phase:
            self._wait_for_peer(rank, posted, phase)

    def _wait_for_peer(self, peer: int, posted: int, phase: int) -> None:
        words = self.words
        for _ in range(self._spin_count):
            if words[posted] >= phase:
                self._spin_count = min(2 * self._spin_count, self._longest_spin)
                return
        self._adapt_spin()
        self.sleep_until(
            lambda: words[posted] >= phase, channel=COLLECTIVE_CHANNEL, marker=peer + 1, awaited=lambda: ({peer},)
        )
        words[self.layout.sleeper(self.rank, COLLECTIVE_CHANNEL)] = 0

    def _adapt_spin(self) -> None:
        """Look less often next time, for the other rank may have no core; now and then try the longest spin again."""
        self._vain_spins += 1
        is_probe = self._vain_spins % _PROBE_INTERVAL == 0
        self._spin_count = self._longest_spin if is_probe else max(CROWDED_SPIN_COUNT, self._spin_count // 2)

    def sleep_until(
        self,
        is_ready: Callable[[], bool],
        *,
        channel: int,
        marker: int,
        awaited: Callable[[], Iterable[set[int]]],
        fails_late: bool = True,
    ) -> None:
        """Sleep until a condition holds that other ranks make true, and of which they then wake this rank.

        Args:
            is_ready: Whether the condition holds.
            channel: The sleeper word to use.
            marker: What to write into it, not 0.
            awaited: Returns sets of ranks. Each set needs a rank that lives: if all have ended, the wait fails.
            fails_late: Whether the group fails after its timeout. Default: True.

        Raises:
            CollectiveError: All ranks of a set have ended or closed, the group was aborted, or is late.
        """
        word = self.layout.sleeper(self.rank, channel)
        limit_seconds = self._limit_seconds if channel == COLLECTIVE_CHANNEL else self.member.timeout_seconds
        start = last_check = time.monotonic()
        while True:
            self.words[word] = marker
            with self._fence:
                pass
            if is_ready():
                return
            self.check()
            remaining = limit_seconds - (last_check - start) if fails_late else SLICE_SECONDS
            self._futex.wait(self._address + word * WORD_BYTES, marker, min(SLICE_SECONDS, remaining))
            if is_ready():
                return
            self.check()
            now = time.monotonic()
            if now - last_check >= min(_CHECK_SECONDS, remaining):
                last_check = now
                sets = list(awaited())
                self._require_living(is_ready, sets)
                if self.watch is not None and channel == COLLECTIVE_CHANNEL:
                    self.watch()
                if fails_late and now - start >= limit_seconds and not is_ready():
                    late = min(min(ranks) for ranks in sets if ranks)
                    self.fail(FailureKind.LATE, self._find_last_awaited(late), limit_seconds)

    def _find_last_awaited(self, rank: int) -> int:
        """Return the rank that others wait for, if the given one itself waits for another: the cause of a timeout."""
        seen = {self.rank}
        while rank not in seen:
            seen.add(rank)
            markers = [self.words[self.layout.sleeper(rank, channel)] for channel in range(CHANNELS)]
            following = next((marker - 1 for marker in markers if 0 < marker <= self.size), rank)
            rank = rank if following == self.rank else following
        return rank

    def _require_living(self, is_ready: Callable[[], bool], sets: Sequence[set[int]]) -> None:
        """Fail if the condition can no longer become true, because all ranks of a set have ended or closed."""
        ended = self._peers.find_ended()
        closed = {rank for rank, _ in self._posted if self.words[self.layout.closed(rank)]}
        for ranks in sets:
            # A rank may have made the condition true before it ended.
            if ranks and ranks <= ended | closed and not is_ready():
                gone = min(ranks & ended or ranks)
                self.fail(FailureKind.ENDED if gone in ended else FailureKind.CLOSED, gone)

    def require_living_peers(self) -> None:
        """Raise a `CollectiveError` unless the group can be used and no rank has left: all others wait for this one."""
        self.check()
        self._require_living(lambda: False, [{rank} for rank, _ in self._posted])

    def check(self) -> None:
        """Raise the `CollectiveError` that says why the group cannot be used, if it cannot."""
        if self.is_forked:
            raise make_forked_error()
        if self.is_closed:
            raise make_error(encode_failure(FailureKind.CLOSED, self.rank), self.member)
        if word := self.words[_FAILURE]:
            raise make_error(word, self.member)

    @property
    def is_forked(self) -> bool:
        """Whether this is a process that the group's rank has forked. It must not touch the shared memory."""
        return os.getpid() != self._process_id

    def fail(self, kind: FailureKind, rank: int, seconds: float = 0.0) -> None:
        """End the group for all ranks, and raise the error that says why. `seconds` is as in `encode_failure`."""
        self.end_group(kind, rank, seconds)
        self.check()

    def end_group(self, kind: FailureKind, rank: int, seconds: float = 0.0) -> None:
        """End the group for all ranks, unless it has ended: their waits raise."""
        if self.is_forked:
            return
        if not self.is_closed and not self.words[_FAILURE]:
            self.words[_FAILURE] = encode_failure(kind, rank, seconds)
        self._wake_everyone()

    @contextmanager
    def limit_waits(self, seconds: float) -> Iterator[None]:
        """Within the context, collectives wait at most so long for other ranks, instead of the group's timeout."""
        usual, self._limit_seconds = self._limit_seconds, seconds
        try:
            yield
        finally:
            self._limit_seconds = usual

    def close(self) -> None:
        """Leave the group. Waits of this rank, and those of others for this rank, raise. Later calls do nothing."""
        if not self.is_closed:
            self.words[self.layout.closed(self.rank)] = 1
            self.is_closed = True
            self._wake_everyone()
            self._peers.close()

    def wake_receiver(self, rank: int) -> None:
        """Wake a rank that sleeps until a message can go on."""
        with self._fence:
            pass
        sleeper = self.layout.sleeper(rank, MESSAGE_CHANNEL)
        if self.words[sleeper]:
            self._wake(sleeper)

    def write_table(self, half: int, values: Sequence[int]) -> None:
        """Publish what this rank calls, for the phase that it posts next. Others read it with `read_table`."""
        start = self.layout.table(self.rank, half)
        for index, value in enumerate(values, start):
            self.words[index] = value

    def read_table(self, rank: int, half: int, index: int) -> int:
        """Return a value that a rank has published."""
        return int(self.words[self.layout.table(rank, half) + index])

    def _wake(self, sleeper: int) -> None:
        self.words[sleeper] = 0
        self._futex.wake(self._address + sleeper * WORD_BYTES)

    def _wake_everyone(self) -> None:
        with self._fence:
            pass
        for rank in range(self.size):
            for channel in (COLLECTIVE_CHANNEL, MESSAGE_CHANNEL):
                self._wake(self.layout.sleeper(rank, channel))

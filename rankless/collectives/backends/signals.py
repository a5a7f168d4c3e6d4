"""How the ranks of a group wait for each other: counters in shared memory, sleep, timeout, and the end of the group.

Note [phases]: each rank counts the phases of all its collectives, and posts the number of the last one that it has
reached. All ranks run the same collectives in the same order, so equal numbers mean equal phases. Waiting for a rank
means waiting until its number is large enough.

Note [sleep]: a rank that has looked often enough writes into its own sleeper word what it waits for, looks again, and
sleeps on that word. A rank that posts looks at the sleeper words of the others. If one waits for it, it sets the word
to 0 and wakes the sleeper. No wake is lost: either the sleeper sees the new number, or the poster sees the word, or
the kernel sees that the word has changed. A store and a later load of another word may be swapped by the processor,
so a lock is taken in between, which no processor moves them across.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rankless.collectives.backends.group_failure import Membership, make_error
from rankless.collectives.backends.memory.control_layout import CHANNELS, ControlLayout
from rankless.collectives.backends.memory.futex import Futex
from rankless.collectives.backends.memory.peer_liveness import PeerProcesses
from rankless.config.resource_limits import core_count
from rankless.errors import CollectiveError
from rankless.records.group_failures import (
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
            raise CollectiveError(
                expected="collectives only in the process that has joined the group",
                found="a call in a process that it has forked",
                fix="make the call in the parent process, or create a group of the new processes",
            )
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

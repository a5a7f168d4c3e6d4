"""The roll call before a collective: every rank writes down what it is about to do, waits for the others, compares.

Note [roll call]: a collective that only some ranks enter, or that they enter differently, hangs or kills the process
(Gloo aborts it when lengths differ). So each rank first writes its call into memory that the ranks of the host share,
under the call's number, and goes on when all have written under that number and the calls fit together. If they do not,
every rank finds the same and raises the same. The wait costs little: the collective would have waited for the same
ranks. Two places per rank are enough: nobody writes number n + 2 before everybody has read n, for it waits at n + 1.

Between hosts there is no such memory, and nothing is compared there yet: part 4 of the project brings a channel.
"""

import mmap
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec

from rankless.collectives.call_signature import Call, PostedCall, format_ranks, require_fitting
from rankless.collectives.shared_memory import create_shared_file, host_identity
from rankless.errors import CollectiveError
from rankless.user_code import caller_line

SLOTS = 2
HEADER_WORDS = 2
"""Of 8 bytes at the head of each place: the call's number, and how many bytes follow."""
BYTES_PER_SLOT = 1024
BYTES_PER_RANK = 32
MAX_LINE_CHARACTERS = 200
SPINS_BEFORE_SLEEP = 50
MAX_SLEEP_SECONDS = 0.001
LONG_WAIT_SECONDS = 2.0
"""Who has waited so long naps longer, in proportion: it is then seen to stand still, and no later by more than 1 %."""
MAX_LONG_WAIT_SLEEP_SECONDS = 0.05
LIVENESS_CHECK_SECONDS = 0.1
NOTIFY_INTERVAL_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Member:
    """What a rank tells of itself when a roll call is opened."""

    rank: int
    """In the group; the members of a lane are two of its ranks."""
    host: str
    process_id: int


class CollectiveCheck:
    """One rank's side of the roll calls of some ranks that make the same collectives in the same order."""

    def __init__(
        self,
        *,
        index: int,
        members: Sequence[Member],
        memory: mmap.mmap,
        path: str | None,
        notify: Callable[[str], None],
    ) -> None:
        self._index = index
        self._members = members
        self._memory = memory
        self._words = memoryview(memory).cast("Q")
        self._slot_bytes = len(memory) // (len(members) * SLOTS)
        self._path = path
        self._notify = notify
        self._number = 0
        self._is_symmetric = True
        self._others = [other for other in range(len(members)) if other != index]

    def write(self, call: Call, line: str) -> None:
        """Write down this rank's next call, and the line of the script where it stands."""
        self._number += 1
        self._is_symmetric = call.send_shapes is None and call.receive_shapes is None
        self._put(PostedCall(call, line[-MAX_LINE_CHARACTERS:]))

    def _put(self, entry: PostedCall) -> None:
        data = msgspec.msgpack.encode(entry)
        if len(data) > self._slot_bytes - 8 * HEADER_WORDS:
            short = Call(operation=entry.call.operation, settings=entry.call.settings[:200])
            data = msgspec.msgpack.encode(PostedCall(short, entry.line))
        at = self._slot_offset(self._index, self._number)
        start = at + 8 * HEADER_WORDS
        self._memory[start : start + len(data)] = data
        self._words[at // 8 + 1] = len(data)
        self._words[at // 8] = self._number

    def is_peer_waiting(self) -> bool:
        """Whether another rank has written a call that this one has not come to yet."""
        number, words = self._number + 1, self._words
        return any(words[self._slot_offset(other, number) // 8] == number for other in self._others)

    def all_posted(self) -> bool:
        """Whether every rank has written down its call of this number."""
        number, words = self._number, self._words
        return all(words[self._slot_offset(other, number) // 8] == number for other in self._others)

    def wait(self, timeout: timedelta) -> None:
        """Wait until every rank has come."""
        number, words = self._number, self._words
        waiting = [self._slot_offset(other, number) // 8 for other in self._others]
        spins, start = 0, 0.0
        checked = received = 0.0
        while any(words[index] != number for index in waiting):
            spins += 1
            if spins <= SPINS_BEFORE_SLEEP:
                time.sleep(0)
                continue
            now = time.monotonic()
            start = start or now
            waited = now - start
            longest = max(MAX_SLEEP_SECONDS, min(MAX_LONG_WAIT_SLEEP_SECONDS, (waited - LONG_WAIT_SECONDS) / 100))
            time.sleep(min(longest, max(0.00002, waited / 10)))
            if waited - checked > LIVENESS_CHECK_SECONDS:
                checked = waited
                self._require_alive_peers()
            if waited - received > NOTIFY_INTERVAL_SECONDS:
                received = waited
                self._notify(
                    f"{self._describe_this_call()}: waiting for {self._names(self._missing())}, {waited:.0f} s"
                )
            if waited > timeout.total_seconds() and not self.all_posted():
                raise self._missing_ranks_error(f"no word from {self._names(self._missing())} in {waited:.1f} s")
        if self._path is not None:
            # All have the memory now; its name may go.
            with suppress(OSError):
                os.unlink(self._path)
            self._path = None

    def compare(self) -> None:
        """Raise CollectiveError unless the calls of all ranks fit together."""
        ranks, names = range(len(self._members)), [member.rank for member in self._members]
        if self._is_symmetric and all(self._data(rank) == self._data(self._index) for rank in self._others):
            return
        try:
            require_fitting([self._posted_call(rank) for rank in ranks], names)
        except (CollectiveError, msgspec.DecodeError):
            time.sleep(0.002)  # a processor may show the number before what belongs to it
            require_fitting([self._posted_call(rank) for rank in ranks], names)

    def _posted_call(self, rank: int) -> PostedCall:
        return msgspec.msgpack.decode(self._data(rank), type=PostedCall)

    def _data(self, rank: int) -> bytes:
        at = self._slot_offset(rank, self._number)
        start = at + 8 * HEADER_WORDS
        return self._memory[start : start + self._words[at // 8 + 1]]

    def _slot_offset(self, rank: int, number: int) -> int:
        return (rank * SLOTS + number % SLOTS) * self._slot_bytes

    def _describe_this_call(self) -> str:
        entry = self._posted_call(self._index)
        return f"{entry.line}: {entry.call.operation}"

    def _missing(self) -> list[int]:
        return [
            other for other in self._others if self._words[self._slot_offset(other, self._number) // 8] != self._number
        ]

    def _names(self, places: Sequence[int]) -> str:
        return format_ranks([self._members[index].rank for index in places])

    def _require_alive_peers(self) -> None:
        gone = [rank for rank in self._missing() if not is_alive(self._members[rank].process_id)]
        # One may have come and ended while we looked.
        gone = [rank for rank in gone if rank in self._missing()]
        if gone:
            raise self._missing_ranks_error(f"{self._names(gone)} ended without it")

    def _missing_ranks_error(self, found: str) -> CollectiveError:
        self._withdraw()
        before = {rank: self._describe_last_call(rank) for rank in self._missing()}
        received = "".join(f"; {self._names([rank])} was last in {text}" for rank, text in before.items() if text)
        return CollectiveError(
            expected=f"all ranks to come to {self._describe_this_call()}",
            found=found + received,
            fix="look at what these ranks do instead: their log, or py-spy dump --pid; every rank must make every call",
        )

    def _withdraw(self) -> None:
        """Let who comes late find that this rank has given up; who comes at this very moment may not."""
        entry = self._posted_call(self._index)
        call = Call(operation=entry.call.operation, settings="given up, for a rank did not come in time")
        self._put(PostedCall(call, entry.line))

    def _describe_last_call(self, rank: int) -> str:
        """What a rank that does not come has written last, in words."""
        at = self._slot_offset(rank, self._number - 1)
        if self._words[at // 8] != self._number - 1 or self._number == 1:
            return ""
        start = at + 8 * HEADER_WORDS
        entry = msgspec.msgpack.decode(self._memory[start : start + self._words[at // 8 + 1]], type=PostedCall)
        return f"{entry.call.operation} at {entry.line}"


def is_alive(process_id: int) -> bool:
    """Whether a process of this host lives; a zombie does not."""
    try:
        with open(f"/proc/{process_id}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except FileNotFoundError:
        if os.path.isdir("/proc/self"):
            return False
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@dataclass(frozen=True, kw_only=True)
class CheckRendezvous:
    """Where the members of a roll call find each other."""

    store: Any
    """A `torch.distributed.Store` of the group."""
    name: str
    timeout: timedelta
    notify: Callable[[str], None]


def open_collective_check(point: CheckRendezvous, *, index: int, ranks: Sequence[int]) -> CollectiveCheck | None:
    """The roll call of some ranks of a group, of which this is the one at `place`; waits for the others.

    None, said once, where they share no memory.
    """
    store, size = point.store, len(ranks)
    # The second group of a program may meet at the store of the first: each opening has keys of its own.
    open_check = store.add(f"rankless/{point.name}/{index}/openings", 1)
    prefix = f"rankless/{point.name}/{open_check}"
    memory_bytes = size * SLOTS * (BYTES_PER_SLOT + BYTES_PER_RANK * size)
    path = create_shared_file(memory_bytes) if index == 0 else ""
    store.set(f"{prefix}/{index}", f"{host_identity()}\n{os.getpid()}\n{path}")
    received = [wait_for_key(point, f"{prefix}/{number}", rank).split("\n") for number, rank in enumerate(ranks)]
    shared = received[0][2]
    if len({host for host, _, _ in received}) > 1 or not shared:
        if index == 0:
            why = "they are on several hosts" if shared else "they could get no shared memory"
            point.notify(f"that the ranks call the same collectives is not checked: {why}")
        return None
    with open(shared, "r+b") as file:
        memory = mmap.mmap(file.fileno(), memory_bytes)
    members = [
        Member(rank=rank, host=host, process_id=int(process_id))
        for rank, (host, process_id, _) in zip(ranks, received, strict=True)
    ]
    return CollectiveCheck(index=index, members=members, memory=memory, path=path or None, notify=point.notify)


def wait_for_key(point: CheckRendezvous, key: str, rank: int) -> str:
    """What a rank has set at the store, once it has; says every few seconds for whom it waits."""
    start = received = time.monotonic()
    sleep_seconds = 0.0001
    while not point.store.check([key]):
        now = time.monotonic()
        if now - received > NOTIFY_INTERVAL_SECONDS:
            received = now
            point.notify(f"{caller_line()}: waiting for rank {rank} at the first collective, {now - start:.0f} s")
        if now - start > point.timeout.total_seconds():
            raise CollectiveError(
                expected="all ranks to come to their first collective",
                found=f"no word from rank {rank} in {now - start:.1f} s",
                fix="look at what it does instead: its log, or py-spy dump --pid; every rank must make every call",
                where=caller_line(),
            )
        time.sleep(
            sleep_seconds := min(
                sleep_seconds * 2, MAX_LONG_WAIT_SLEEP_SECONDS if now - start < 2 * LONG_WAIT_SECONDS else 0.2
            )
        )
    return bytes(point.store.get(key)).decode()

"""Compare the ranks' calls before a collective: each rank posts its call, waits for the others, and compares.

Note [collective check]: a collective that only some ranks call, or that they call differently, hangs or kills the
process (Gloo aborts it if lengths differ). So each rank first posts its call in memory that the ranks of the host
share, under the number of the call. It goes on when all ranks have posted under that number and the calls match. If
they do not match, every rank finds the same mismatch and raises the same error. The wait costs little, because the
collective would wait for the same ranks. Two slots per rank are enough: a rank posts call n + 2 only after all ranks
have read call n, because it waits for them at n + 1.

Hosts share no memory, so between hosts calls are not compared yet.
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

from rankless.collectives.call_signature import Call, PostedCall, require_matching
from rankless.collectives.shared_memory_file import create_shared_file, host_identity
from rankless.errors import CollectiveError
from rankless.records.encoding import encode_msgpack
from rankless.records.number_formatting import format_ranks
from rankless.user_code import caller_line

SLOTS = 2
HEADER_WORDS = 2
"""Words of 8 bytes at the head of each slot: the number of the call, and how many bytes follow."""
BYTES_PER_SLOT = 1024
BYTES_PER_RANK = 32
MAX_LINE_CHARACTERS = 200
SPINS_BEFORE_SLEEP = 50
MAX_SLEEP_SECONDS = 0.001
LONG_WAIT_SECONDS = 2.0
"""After this wait the sleeps grow with the wait, up to 1 % of it. The watchdog then sees that the rank waits."""
MAX_LONG_WAIT_SLEEP_SECONDS = 0.05
LIVENESS_CHECK_SECONDS = 0.1
NOTIFY_INTERVAL_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class RankIdentity:
    """One rank of a collective check, as the others know it."""

    rank: int
    """In the group; the members of a channel are two of its ranks."""
    host: str
    process_id: int


class CollectiveCheck:
    """One rank's side of the comparison, for ranks that make the same collectives in the same order."""

    def __init__(
        self,
        *,
        index: int,
        members: Sequence[RankIdentity],
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

    def post(self, call: Call, line: str) -> None:
        """Post this rank's next call, with its line in the script."""
        self._number += 1
        self._is_symmetric = call.send_shapes is None and call.receive_shapes is None
        self._write(PostedCall(call, line[-MAX_LINE_CHARACTERS:]))

    def _write(self, posted: PostedCall) -> None:
        data = encode_msgpack(posted)
        if len(data) > self._slot_bytes - 8 * HEADER_WORDS:
            short = Call(operation=posted.call.operation, settings=posted.call.settings[:200])
            data = encode_msgpack(PostedCall(short, posted.line))
        offset = self._slot_offset(self._index, self._number)
        start = offset + 8 * HEADER_WORDS
        self._memory[start : start + len(data)] = data
        self._words[offset // 8 + 1] = len(data)
        self._words[offset // 8] = self._number

    def is_peer_waiting(self) -> bool:
        """Return whether another rank has posted a call that this rank has not made yet."""
        number, words = self._number + 1, self._words
        return any(words[self._slot_offset(other, number) // 8] == number for other in self._others)

    def all_posted(self) -> bool:
        """Return whether every rank has posted its call of this number."""
        number, words = self._number, self._words
        return all(words[self._slot_offset(other, number) // 8] == number for other in self._others)

    def wait_for_all(self, timeout: timedelta) -> None:
        """Return when every rank has posted. Raises `CollectiveError` at the timeout, or if a rank's process ended."""
        number, words = self._number, self._words
        awaited = [self._slot_offset(other, number) // 8 for other in self._others]
        spins, start = 0, 0.0
        checked_at = notified_at = 0.0
        while any(words[word] != number for word in awaited):
            spins += 1
            if spins <= SPINS_BEFORE_SLEEP:
                time.sleep(0)
                continue
            now = time.monotonic()
            start = start or now
            waited = now - start
            longest = max(MAX_SLEEP_SECONDS, min(MAX_LONG_WAIT_SLEEP_SECONDS, (waited - LONG_WAIT_SECONDS) / 100))
            time.sleep(min(longest, max(0.00002, waited / 10)))
            if waited - checked_at > LIVENESS_CHECK_SECONDS:
                checked_at = waited
                self._require_living_peers()
            if waited - notified_at > NOTIFY_INTERVAL_SECONDS:
                notified_at = waited
                self._notify(
                    f"{self._describe_this_call()}: waiting for {self._format_members(self._missing())}, {waited:.0f} s"
                )
            if waited > timeout.total_seconds() and not self.all_posted():
                raise self._missing_ranks_error(
                    f"no call from {self._format_members(self._missing())} in {waited:.1f} s"
                )
        if self._path is not None:
            # All ranks have mapped the file, so its name is not needed any more.
            with suppress(OSError):
                os.unlink(self._path)
            self._path = None

    def compare(self) -> None:
        """Raise `CollectiveError` unless the calls of all ranks match."""
        indices, ranks = range(len(self._members)), [member.rank for member in self._members]
        if self._is_symmetric and all(self._data(other) == self._data(self._index) for other in self._others):
            return
        try:
            require_matching([self._posted_call(index) for index in indices], ranks)
        except (CollectiveError, msgspec.DecodeError):
            time.sleep(0.002)  # a processor may show the number before the data that belongs to it
            require_matching([self._posted_call(index) for index in indices], ranks)

    def _posted_call(self, index: int) -> PostedCall:
        return msgspec.msgpack.decode(self._data(index), type=PostedCall)

    def _data(self, index: int) -> bytes:
        offset = self._slot_offset(index, self._number)
        start = offset + 8 * HEADER_WORDS
        return self._memory[start : start + self._words[offset // 8 + 1]]

    def _slot_offset(self, index: int, number: int) -> int:
        return (index * SLOTS + number % SLOTS) * self._slot_bytes

    def _describe_this_call(self) -> str:
        posted = self._posted_call(self._index)
        return f"{posted.line}: {posted.call.operation}"

    def _missing(self) -> list[int]:
        return [
            other for other in self._others if self._words[self._slot_offset(other, self._number) // 8] != self._number
        ]

    def _format_members(self, indices: Sequence[int]) -> str:
        return format_ranks([self._members[index].rank for index in indices])

    def _require_living_peers(self) -> None:
        ended = [index for index in self._missing() if not is_alive(self._members[index].process_id)]
        # A rank may have posted and ended since the first look.
        ended = [index for index in ended if index in self._missing()]
        if ended:
            raise self._missing_ranks_error(f"{self._format_members(ended)} ended without the call")

    def _missing_ranks_error(self, found: str) -> CollectiveError:
        self._post_withdrawal()
        last_calls = {index: self._describe_last_call(index) for index in self._missing()}
        details = "".join(
            f"; {self._format_members([index])} was last in {text}" for index, text in last_calls.items() if text
        )
        return CollectiveError(
            expected=f"all ranks to call {self._describe_this_call()}",
            found=found + details,
            fix="see what these ranks do instead, in their log or with py-spy dump --pid; every rank must make every "
            "call",
        )

    def _post_withdrawal(self) -> None:
        """Let a rank that calls later see that this rank has given up. A rank that calls right now may not see it."""
        posted = self._posted_call(self._index)
        call = Call(operation=posted.call.operation, settings="given up, because a rank did not call it in time")
        self._write(PostedCall(call, posted.line))

    def _describe_last_call(self, index: int) -> str:
        """Return the last call of a rank that is missing; "" if there is none."""
        offset = self._slot_offset(index, self._number - 1)
        if self._words[offset // 8] != self._number - 1 or self._number == 1:
            return ""
        start = offset + 8 * HEADER_WORDS
        data = self._memory[start : start + self._words[offset // 8 + 1]]
        posted = msgspec.msgpack.decode(data, type=PostedCall)
        return f"{posted.call.operation} at {posted.line}"


def is_alive(process_id: int) -> bool:
    """Return whether a process of this host lives; a zombie does not."""
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
    """Where the members of a collective check find one another."""

    store: Any
    """A `torch.distributed.Store` of the group."""
    name: str
    timeout: timedelta
    notify: Callable[[str], None]


def open_collective_check(point: CheckRendezvous, *, index: int, ranks: Sequence[int]) -> CollectiveCheck | None:
    """Open the check of some ranks of a group, of which this process is the one at `index`. Waits for the others.

    Returns None, after a notice to the user, if the ranks share no memory.
    """
    store, size = point.store, len(ranks)
    # Two groups of a program may share a store, so each opening has keys of its own.
    opening = store.add(f"rankless/{point.name}/{index}/openings", 1)
    prefix = f"rankless/{point.name}/{opening}"
    memory_bytes = size * SLOTS * (BYTES_PER_SLOT + BYTES_PER_RANK * size)
    path = create_shared_file(memory_bytes) if index == 0 else ""
    store.set(f"{prefix}/{index}", f"{host_identity()}\n{os.getpid()}\n{path}")
    infos = [read_member_info(point, f"{prefix}/{number}", rank).split("\n") for number, rank in enumerate(ranks)]
    shared_path = infos[0][2]
    if len({host for host, _, _ in infos}) > 1 or not shared_path:
        if index == 0:
            reason = "they are on several hosts" if shared_path else "there is no shared memory"
            point.notify(f"cannot check that the ranks call the same collectives: {reason}")
        return None
    with open(shared_path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), memory_bytes)
    members = [
        RankIdentity(rank=rank, host=host, process_id=int(process_id))
        for rank, (host, process_id, _) in zip(ranks, infos, strict=True)
    ]
    return CollectiveCheck(index=index, members=members, memory=memory, path=path or None, notify=point.notify)


def read_member_info(point: CheckRendezvous, key: str, rank: int) -> str:
    """Return what a rank has set in the store. Waits for it, and notifies the user every few seconds."""
    start = notified_at = time.monotonic()
    sleep_seconds = 0.0001
    while not point.store.check([key]):
        now = time.monotonic()
        if now - notified_at > NOTIFY_INTERVAL_SECONDS:
            notified_at = now
            point.notify(f"{caller_line()}: waiting for rank {rank} at the first collective, {now - start:.0f} s")
        if now - start > point.timeout.total_seconds():
            raise CollectiveError(
                expected="all ranks to make their first call of a collective",
                found=f"no call from rank {rank} in {now - start:.1f} s",
                fix="see what it does instead, in its log or with py-spy dump --pid; every rank must make every call",
                where=caller_line(),
            )
        limit = MAX_LONG_WAIT_SLEEP_SECONDS if now - start < 2 * LONG_WAIT_SECONDS else 0.2
        time.sleep(sleep_seconds := min(sleep_seconds * 2, limit))
    return bytes(point.store.get(key)).decode()

"""Do all ranks come to the same places in the same order? Each writes down where it is, and reads the others.

Note [lockstep]: every collective place of a script (a job's call, a loader's pass, `save`, `once`, the script's end) is
an event with a number. A rank writes its event into memory that all ranks of the host share, then reads what the
others have written under the same number. Nobody waits: whoever comes later compares. If two events differ, that
rank
raises before it enters a collective that nobody else is in, and the job is ended; the other, which may hang in one
already, need not notice anything. It costs microseconds, where a message per call would cost a round trip.

Between hosts there is no such memory: there nothing is compared yet (part 4 brings a channel), and that is said once.
"""

import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rankless.collectives.byte_messages import all_gather_bytes, barrier
from rankless.collectives.call_signature import format_ranks
from rankless.collectives.shared_memory import create_shared_file, host_identity
from rankless.errors import RanksDiverged
from rankless.parallel.mesh import Mesh
from rankless.user_code import caller_line

SLOTS = 64
"""Events of each rank that can be read: a rank that is further ahead than this is not compared."""
ENTRY_BYTES = 1024
NUMBER = struct.Struct("<Q")
HEADER = struct.Struct("<HH")
"""Bytes of the text, and how many digests follow it; what is left is the line, and on another the remark."""
LENGTH_BYTES = 2
"""At the end of each entry's place: how many bytes of it are in use."""
MAX_DIGESTS = 32
MAX_LINE_BYTES = 160
REREADS = 5
END_OF_SCRIPT = "the end of the script"
FIX = (
    "make every rank's script take the same way: branch on rankless.rank() only around what is not a job, a loader, "
    "save, load or once, let all ranks decide alike when a loop ends, and change or load models on all of them"
)
FIX_OF_VALUES = (
    "give every rank the same: read it with rankless.loader, draw it from the generators that all ranks share, or "
    "compute it on one rank and pass it on with rankless.once"
)


class DesyncDetector:
    """One rank's side of the comparison: `come` at every event."""

    def __init__(self, mesh: Mesh, *, notify: Callable[[str], None]) -> None:
        self._mesh = mesh
        self._notify = notify
        self._memory: mmap.mmap | None = None
        self._opened = False
        self._number = 0
        self._fence = threading.Lock()

    def check_sync_point(
        self,
        text: str,
        *,
        names: Callable[[], Sequence[str]] = tuple,
        digests: Sequence[int] = (),
        remark: str = "",
    ) -> None:
        """Return if no rank is known to be elsewhere; else raise `RanksDiverged`, which says who is where.

        `text` says what this event is; it must be the same on every rank, and so must the `digests` (64 bits each) of
        what `names` gives names to. A `remark` is this rank's own: not compared, shown where digests differ. Collective
        the first time.
        """
        if not self._opened:
            self._open()
        if self._memory is None:
            return
        self._number += 1
        core = encode_event(text, digests)
        line = caller_line() if text != END_OF_SCRIPT else ""
        self._write(core, line, remark)
        with self._fence:  # a full fence: our entry is seen by others before we read theirs
            pass
        for rank in range(self._mesh.size):
            if rank != self._mesh.rank and not self._matches(rank, core):
                raise self._divergence_error(text, core, names(), digests, line)

    def end(self) -> None:
        """The event of a script's end; nothing for a rank that never came to any other."""
        if self._memory is not None:
            self.check_sync_point(END_OF_SCRIPT)

    def _open(self) -> None:
        """Share memory: rank 0 makes a file, all map it, and its name goes at once."""
        self._opened = True
        mesh = self._mesh
        size = mesh.size * SLOTS * ENTRY_BYTES
        path = create_shared_file(size) if mesh.rank == 0 else ""
        try:
            mine = f"{host_identity()}\n{path}".encode()
            received = [data.decode().partition("\n") for data in all_gather_bytes(mine, mesh=mesh)]
            shared = received[0][2]
            if len({host for host, _, _ in received}) > 1 or not shared:
                why = "they are on several hosts" if shared else "they could get no shared memory"
                self._notify(f"that all ranks make the same calls in the same order is not checked: {why}")
                return
            with open(shared, "r+b") as file:
                self._memory = mmap.mmap(file.fileno(), size)
            barrier(mesh)
        finally:
            if path:
                os.unlink(path)

    def _write(self, core: bytes, line: str, remark: str) -> None:
        memory = self._memory
        assert memory is not None
        at = self._slot_offset(self._mesh.rank)
        payload = core + line.encode()[-MAX_LINE_BYTES:] + b"\n" + remark.encode()
        payload = payload[: ENTRY_BYTES - NUMBER.size - LENGTH_BYTES]
        memory[at + NUMBER.size : at + NUMBER.size + len(payload)] = payload
        memory[at + ENTRY_BYTES - LENGTH_BYTES : at + ENTRY_BYTES] = len(payload).to_bytes(LENGTH_BYTES, "little")
        memory[at : at + NUMBER.size] = NUMBER.pack(self._number)

    def _matches(self, rank: int, core: bytes) -> bool:
        """Whether a rank has come to the same, or has not come yet, or is too far ahead to tell."""
        memory = self._memory
        assert memory is not None
        at = self._slot_offset(rank)
        start = at + NUMBER.size
        for attempt in range(REREADS):
            if NUMBER.unpack_from(memory, at)[0] != self._number or memory[start : start + len(core)] == core:
                return True
            # A processor may show the number before what belongs to it.
            time.sleep(0.0002 * attempt)
        return False

    def _slot_offset(self, rank: int) -> int:
        return (rank * SLOTS + self._number % SLOTS) * ENTRY_BYTES

    def _divergence_error(
        self, text: str, core: bytes, names: Sequence[str], digests: Sequence[int], line: str
    ) -> RanksDiverged:
        """The error: who came to this, who to something else, and where."""
        entries = {rank: self._read_sync_point(rank) for rank in range(self._mesh.size)}
        here = {rank: entry for rank, entry in entries.items() if entry is not None}
        alike = [rank for rank, (payload, _) in here.items() if payload.startswith(core)]
        others = [rank for rank in here if rank not in alike]
        other = here[others[0]][1]
        if other.text != text:
            return RanksDiverged(
                expected=f"all ranks to come to the same next: {format_ranks(alike)} came to {text}",
                found=f"{format_ranks(others)} came to {other.text}{f' ({other.line})' if other.line else ''}",
                fix=FIX,
                where=line or None,
            )
        pairs = zip(names, digests, other.digests, strict=False)
        named = [name for name, one, other in pairs if one != other] or ["its inputs"]
        odd, most = (alike, others) if len(alike) < len(others) else (others, alike)
        return RanksDiverged(
            expected=f"the same {named[0]} on every rank, in {text}",
            found=f"{' and '.join(named)} of {format_ranks(odd)}: other values than of {format_ranks(most)}"
            + "".join(f"; on rank {rank} {entry.remark}" for rank, (_, entry) in here.items() if entry.remark),
            fix=FIX_OF_VALUES,
            where=line,
        )

    def _read_sync_point(self, rank: int) -> tuple[bytes, "SyncPoint"] | None:
        """What a rank has written under this number, if it has come to it."""
        memory = self._memory
        assert memory is not None
        at = self._slot_offset(rank)
        if NUMBER.unpack_from(memory, at)[0] != self._number:
            return None
        length = int.from_bytes(memory[at + ENTRY_BYTES - LENGTH_BYTES : at + ENTRY_BYTES], "little")
        payload = memory[at + NUMBER.size : at + NUMBER.size + length]
        return payload, decode_event(payload)


def encode_event(text: str, digests: Sequence[int]) -> bytes:
    """What must be equal on all ranks, as bytes."""
    data = text.encode()
    if len(data) > 500:
        data = data[:480] + f"… {zlib.crc32(data):08x}".encode()
    kept = digests[:MAX_DIGESTS]
    return HEADER.pack(len(data), len(kept)) + data + struct.pack(f"<{len(kept)}Q", *kept)


@dataclass(frozen=True, kw_only=True)
class SyncPoint:
    """What a rank has written of an event."""

    text: str
    digests: tuple[int, ...]
    line: str
    remark: str


def decode_event(payload: bytes) -> SyncPoint:
    """An entry from its bytes."""
    length, count = HEADER.unpack_from(payload)
    text = payload[HEADER.size : HEADER.size + length].decode(errors="replace")
    at = HEADER.size + length
    digests = struct.unpack_from(f"<{count}Q", payload, at)
    line, _, remark = payload[at + 8 * count :].decode(errors="replace").partition("\n")
    return SyncPoint(text=text, digests=digests, line=line, remark=remark)

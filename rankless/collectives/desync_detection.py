"""Detect ranks that make different calls, or the same call with different values, without a message between them.

Note [desync detection]: every collective call of a script (a job's call, a pass over a loader, `save`, `once`, the end
of the script) is a sync point with a number. A rank writes its sync point into memory that all ranks of the host share,
then reads what the others have written under the same number. No rank waits: the rank that arrives later compares. If
two sync points differ, that rank raises before it enters a collective that no other rank is in, and the job ends. The
other rank may hang in a collective already, and need not notice anything. The comparison costs microseconds; a message
per call would cost a round trip.

Hosts share no memory, so between hosts calls are not compared yet. Rankless notifies the user of that once.
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
"""Sync points of each rank that can be read. A rank that is further ahead than this is not compared."""
ENTRY_BYTES = 1024
NUMBER = struct.Struct("<Q")
HEADER = struct.Struct("<HH")
"""Bytes of the text, and number of digests after it. The line of the script and the remark follow."""
LENGTH_BYTES = 2
"""At the end of each entry: how many bytes of it are in use."""
MAX_DIGESTS = 32
MAX_LINE_BYTES = 160
REREADS = 5
END_OF_SCRIPT = "the end of the script"
FIX = (
    "let every rank make the same calls: branch on rankless.rank() only around code without a job, a loader, save, "
    "load or once, end loops on all ranks at the same time, and change or load models on all ranks"
)
FIX_OF_VALUES = (
    "give every rank the same values: read them with rankless.loader, draw them from the generators that all ranks "
    "share, or compute them on one rank with rankless.once"
)


class DesyncDetector:
    """One rank's side of the comparison."""

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
        """Post this rank's sync point. Raise `RanksDiverged` if another rank has posted a different one.

        `text` names the sync point and must be equal on every rank. So must the `digests` of 64 bits, to which `names`
        returns the names. A `remark` is not compared; the error shows it if digests differ. The first call is
        collective.
        """
        if not self._opened:
            self._open()
        if self._memory is None:
            return
        self._number += 1
        core = encode_sync_point(text, digests)
        line = caller_line() if text != END_OF_SCRIPT else ""
        self._write(core, line, remark)
        with self._fence:  # a full memory fence: other ranks see our entry before we read theirs
            pass
        for rank in range(self._mesh.size):
            if rank != self._mesh.rank and not self._matches(rank, core):
                raise self._divergence_error(text, core, names(), digests, line)

    def end(self) -> None:
        """Post the end of the script as a sync point, if this rank has had one before."""
        if self._memory is not None:
            self.check_sync_point(END_OF_SCRIPT)

    def _open(self) -> None:
        """Share memory: rank 0 creates a file, all ranks map it, and rank 0 removes its name."""
        self._opened = True
        mesh = self._mesh
        size = mesh.size * SLOTS * ENTRY_BYTES
        path = create_shared_file(size) if mesh.rank == 0 else ""
        try:
            own_info = f"{host_identity()}\n{path}".encode()
            infos = [data.decode().partition("\n") for data in all_gather_bytes(own_info, mesh=mesh)]
            shared = infos[0][2]
            if len({host for host, _, _ in infos}) > 1 or not shared:
                reason = "they are on several hosts" if shared else "there is no shared memory"
                self._notify(f"cannot check that all ranks make the same calls in the same order: {reason}")
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
        """Return whether a rank has posted the same sync point, has not arrived yet, or is too far ahead to compare."""
        memory = self._memory
        assert memory is not None
        at = self._slot_offset(rank)
        start = at + NUMBER.size
        for attempt in range(REREADS):
            if NUMBER.unpack_from(memory, at)[0] != self._number or memory[start : start + len(core)] == core:
                return True
            # A processor may show the number before the data that belongs to it.
            time.sleep(0.0002 * attempt)
        return False

    def _slot_offset(self, rank: int) -> int:
        return (rank * SLOTS + self._number % SLOTS) * ENTRY_BYTES

    def _divergence_error(
        self, text: str, core: bytes, names: Sequence[str], digests: Sequence[int], line: str
    ) -> RanksDiverged:
        """Return the error, which names the ranks, their calls and their lines."""
        entries = {rank: self._read_sync_point(rank) for rank in range(self._mesh.size)}
        here = {rank: entry for rank, entry in entries.items() if entry is not None}
        same = [rank for rank, (payload, _) in here.items() if payload.startswith(core)]
        others = [rank for rank in here if rank not in same]
        other = here[others[0]][1]
        if other.text != text:
            return RanksDiverged(
                expected=f"all ranks to reach the same call: {format_ranks(same)} reached {text}",
                found=f"{format_ranks(others)} reached {other.text}{f' ({other.line})' if other.line else ''}",
                fix=FIX,
                where=line or None,
            )
        pairs = zip(names, digests, other.digests, strict=False)
        named = [name for name, one, other in pairs if one != other] or ["its inputs"]
        odd, most = (same, others) if len(same) < len(others) else (others, same)
        return RanksDiverged(
            expected=f"the same {named[0]} on every rank, in {text}",
            found=f"{' and '.join(named)} on {format_ranks(odd)}: other values than on {format_ranks(most)}"
            + "".join(f"; on rank {rank} {entry.remark}" for rank, (_, entry) in here.items() if entry.remark),
            fix=FIX_OF_VALUES,
            where=line,
        )

    def _read_sync_point(self, rank: int) -> tuple[bytes, "SyncPoint"] | None:
        """Return what a rank has posted under this number; None if it has not arrived or is too far ahead."""
        memory = self._memory
        assert memory is not None
        at = self._slot_offset(rank)
        if NUMBER.unpack_from(memory, at)[0] != self._number:
            return None
        length = int.from_bytes(memory[at + ENTRY_BYTES - LENGTH_BYTES : at + ENTRY_BYTES], "little")
        payload = memory[at + NUMBER.size : at + NUMBER.size + length]
        return payload, decode_sync_point(payload)


def encode_sync_point(text: str, digests: Sequence[int]) -> bytes:
    """Return what must be equal on all ranks, as bytes."""
    data = text.encode()
    if len(data) > 500:
        data = data[:480] + f"… {zlib.crc32(data):08x}".encode()
    kept = digests[:MAX_DIGESTS]
    return HEADER.pack(len(data), len(kept)) + data + struct.pack(f"<{len(kept)}Q", *kept)


@dataclass(frozen=True, kw_only=True)
class SyncPoint:
    """What a rank has posted at a sync point."""

    text: str
    digests: tuple[int, ...]
    line: str
    remark: str


def decode_sync_point(payload: bytes) -> SyncPoint:
    """Return the sync point of bytes."""
    length, count = HEADER.unpack_from(payload)
    text = payload[HEADER.size : HEADER.size + length].decode(errors="replace")
    at = HEADER.size + length
    digests = struct.unpack_from(f"<{count}Q", payload, at)
    line, _, remark = payload[at + 8 * count :].decode(errors="replace").partition("\n")
    return SyncPoint(text=text, digests=digests, line=line, remark=remark)

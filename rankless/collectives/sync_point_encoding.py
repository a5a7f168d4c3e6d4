"""A sync point of one rank as bytes, and the error that describes how the sync points of ranks differ.

A sync point has at most `MAX_DIGESTS` digests. If a call has more values, the last digest is one of all the others.
"""

import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rankless.errors import RanksDiverged
from rankless.parallel.mesh import DescribeDifference
from rankless.records.number_formatting import format_ranks

HEADER = struct.Struct("<HH")
"""Bytes of the text, and number of digests after it. Both are part of what ranks compare."""
TAIL = struct.Struct("<HHH")
"""Bytes of the line, of the remark, and of the details."""
MAX_TEXT_BYTES = 500
MAX_DIGESTS = 32
MAX_LINE_BYTES = 160
MAX_REMARK_BYTES = 500
MAX_DETAILS_BYTES = 2500
MAX_SYNC_POINT_BYTES = 4000
FIX = (
    "let every rank make the same calls: branch on rankless.rank() only around code without a job, a loader, save, "
    "load or once, end loops on all ranks at the same time, and change or load models on all ranks"
)
FIX_OF_VALUES = (
    "give every rank the same values: read them with rankless.loader, draw them from the generators that all ranks "
    "share, or compute them on one rank with rankless.once. A script that takes a share of its data by RANK or "
    "rankless.rank() must take all of it: the loader and the job divide batches"
)
CHECKPOINTS = "rankless.save or load: "
"""The text of sync points of checkpoints begins with it, and a path follows."""
FIX_OF_PATHS = (
    "use one path on all ranks: one with the time, the process or a random name is another on each; make it once, as "
    'folder = rankless.once(time.strftime, "runs/%H-%M-%S")'
)


def encode_compared(text: str, digests: Sequence[int]) -> bytes:
    """Return what must be equal on all ranks, as bytes."""
    data = text.encode()
    if len(data) > MAX_TEXT_BYTES:
        data = data[: MAX_TEXT_BYTES - 20] + f"… {zlib.crc32(data):08x}".encode()
    kept = digests
    if len(digests) > MAX_DIGESTS:
        rest = digests[MAX_DIGESTS - 1 :]
        kept = [*digests[: MAX_DIGESTS - 1], zlib.crc32(struct.pack(f"<{len(rest)}Q", *rest))]
    return HEADER.pack(len(data), len(kept)) + data + struct.pack(f"<{len(kept)}Q", *kept)


def encode_explanation(line: str, remark: str, details: bytes) -> bytes:
    """Return what explains a sync point, as bytes. Details that are too long are left out."""
    line_bytes, remark_bytes = line.encode()[-MAX_LINE_BYTES:], remark.encode()[:MAX_REMARK_BYTES]
    kept = details if len(details) <= MAX_DETAILS_BYTES else b""
    return TAIL.pack(len(line_bytes), len(remark_bytes), len(kept)) + line_bytes + remark_bytes + kept


@dataclass(frozen=True, kw_only=True)
class PostedSyncPoint:
    """What a rank has posted at a sync point."""

    compared: bytes
    """The text and the digests as bytes, which must be equal on all ranks."""
    text: str
    digests: tuple[int, ...]
    line: str
    remark: str
    details: bytes


def decode_sync_point(payload: bytes) -> PostedSyncPoint:
    """Return the sync point of bytes."""
    length, count = HEADER.unpack_from(payload)
    text = payload[HEADER.size : HEADER.size + length].decode(errors="replace")
    end = HEADER.size + length + 8 * count
    line_bytes, remark_bytes, details_bytes = TAIL.unpack_from(payload, end)
    line = end + TAIL.size
    remark = line + line_bytes
    details = remark + remark_bytes
    return PostedSyncPoint(
        compared=payload[:end],
        text=text,
        digests=struct.unpack_from(f"<{count}Q", payload, HEADER.size + length),
        line=payload[line:remark].decode(errors="replace"),
        remark=payload[remark:details].decode(errors="replace"),
        details=payload[details : details + details_bytes],
    )


@dataclass(frozen=True, kw_only=True)
class SyncPointNames:
    """What a rank knows about its own sync point besides the bytes that it posts."""

    names: Callable[[], Sequence[str]]
    """Returns the names of the digests."""
    describe: DescribeDifference
    line: str


def make_divergence_error(points: Mapping[int, PostedSyncPoint], *, rank: int, known: SyncPointNames) -> RanksDiverged:
    """Return the error that names the ranks, their calls and their lines.

    `points` holds what each rank has posted under one number, and `rank` is the rank that compares.
    """
    own = points[rank]
    same = [other for other, point in points.items() if point.compared == own.compared]
    others = [other for other in points if other not in same]
    first = points[others[0]]
    if first.text != own.text:
        return RanksDiverged(
            expected=f"all ranks to reach the same call: {format_ranks(same)} reached {own.text}",
            found=f"{format_ranks(others)} reached {first.text}{f' ({first.line})' if first.line else ''}",
            fix=FIX_OF_PATHS if own.text.startswith(CHECKPOINTS) and first.text.startswith(CHECKPOINTS) else FIX,
            where=known.line or None,
        )
    pairs = zip(shorten_names(known.names()), own.digests, first.digests, strict=False)
    named = [name for name, one, other in pairs if one != other] or ["its inputs"]
    described = known.describe(named, {other: point.details for other, point in points.items()})
    if described is not None:
        found, fix = described
        return RanksDiverged(
            expected=f"the same {named[0]} on every rank, in {own.text}", found=found, fix=fix, where=known.line
        )
    odd, most = (same, others) if len(same) < len(others) else (others, same)
    return RanksDiverged(
        expected=f"the same {named[0]} on every rank, in {own.text}",
        found=f"{' and '.join(named)} on {format_ranks(odd)}: other values than on {format_ranks(most)}"
        + "".join(f"; on rank {other} {point.remark}" for other, point in points.items() if point.remark),
        fix=FIX_OF_VALUES,
        where=known.line,
    )


def shorten_names(names: Sequence[str]) -> Sequence[str]:
    """Return the names of the digests that are compared. The last one stands for all values that share its digest."""
    shared = names[MAX_DIGESTS - 1 :]
    if len(shared) < 2:
        return names
    return [*names[: MAX_DIGESTS - 1], f"one of the {len(shared)} values from {shared[0]} to {shared[-1]}"]

"""What ends a process group in shared memory, as one word at the start of its memory.

The ranks of the group write and read the word. The launcher writes it too, to release ranks that wait for one that does
not answer.
"""

import enum

WORD_BYTES = 8
FAILURE_OFFSET, MARK_OFFSET = 0, WORD_BYTES
"""In bytes from the start of the memory: where the word is, and the mark by which the launcher knows such memory."""
GROUP_MARK = 0x52414E4B4C455353
_KIND_BITS, _RANK_BITS = 8, 16
_MOST_MILLISECONDS = (1 << 40) - 1


class FailureKind(enum.IntEnum):
    """What ended a group."""

    ABORTED = 1
    ENDED = 2
    LATE = 3
    CLOSED = 4
    MISMATCH = 5
    INTERRUPTED = 6
    RUN_ENDED = 7
    OTHER_HOST = 8
    LEFT = 9


def encode_failure(kind: FailureKind, rank: int, seconds: float = 0.0) -> int:
    """Return the word, not 0, for a failure that concerns a rank of the group.

    Args:
        kind: What ended the group.
        rank: The rank of the group that the failure concerns.
        seconds: For `LATE`, how long the others have waited for the rank.
    """
    milliseconds = min(_MOST_MILLISECONDS, round(1000 * seconds))
    return (milliseconds << _RANK_BITS | rank) << _KIND_BITS | int(kind)


def decode_failure(word: int) -> tuple[FailureKind, int, float]:
    """Return what `encode_failure` was called with."""
    kind, rest = FailureKind(word & ((1 << _KIND_BITS) - 1)), word >> _KIND_BITS
    return kind, rest & ((1 << _RANK_BITS) - 1), (rest >> _RANK_BITS) / 1000

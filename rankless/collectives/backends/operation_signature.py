"""What a rank calls, as one number that ranks compare: the collective, its dtype, reduction, root and length."""

import enum
import functools
import zlib
from array import array
from collections.abc import Sequence

import torch

from rankless.collectives.backends.reductions import describe_reduction

_DTYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
)
_COUNT_BITS, _ROOT_BITS, _REDUCTION_BITS, _DTYPE_BITS = 39, 12, 4, 4
NO_REDUCTION = (1 << _REDUCTION_BITS) - 1
_UNEVEN = 1 << (_COUNT_BITS - 1)
"""In a count: the rest is a checksum of lengths that differ by rank."""


class Collective(enum.IntEnum):
    """The collectives that ranks compare. The values are part of the memory that they share."""

    ALL_REDUCE = 1
    REDUCE = 2
    REDUCE_SCATTER = 3
    BROADCAST = 4
    ALL_GATHER = 5
    GATHER = 6
    SCATTER = 7
    ALL_TO_ALL = 8
    BARRIER = 9
    FUSED_ALL_REDUCE = 10


@functools.lru_cache(maxsize=4096)
def encode_signature(
    collective: Collective,
    *,
    count: int = 0,
    root: int = 0,
    dtype: torch.dtype = torch.uint8,
    reduction: int = NO_REDUCTION,
) -> int:
    """Return the number of a call.

    Args:
        collective: What is called.
        count: The number of values, or of bytes for what only moves them. 0 if ranks may have different numbers.
        root: The root's rank in the group.
        dtype: The dtype of what is reduced.
        reduction: The number of the reduction.
    """
    number = int(collective)
    for bits, value in (
        (_DTYPE_BITS, _DTYPES.index(dtype)),
        (_REDUCTION_BITS, reduction),
        (_ROOT_BITS, root),
        (_COUNT_BITS, count & ((1 << _COUNT_BITS) - 1)),
    ):
        number = number << bits | value
    return number


def sign_reduction(collective: Collective, count: int, number: int, dtype: torch.dtype, root: int | None = None) -> int:
    """Return the number of a call that reduces values, given the number of its reduction."""
    return encode_signature(collective, count=count, root=root or 0, dtype=dtype, reduction=number)


def fold_lengths(lengths: Sequence[int]) -> int:
    """Return the count of a call with a length for each rank: their sum if they are equal, else a checksum."""
    if min(lengths) == max(lengths):
        return sum(lengths)
    return _UNEVEN | zlib.crc32(array("q", lengths).tobytes())


def describe_signature(number: int) -> str:
    """Return a call as text, for errors."""
    count, number = number & ((1 << _COUNT_BITS) - 1), number >> _COUNT_BITS
    root, number = number & ((1 << _ROOT_BITS) - 1), number >> _ROOT_BITS
    reduction, number = number & ((1 << _REDUCTION_BITS) - 1), number >> _REDUCTION_BITS
    dtype, number = number & ((1 << _DTYPE_BITS) - 1), number >> _DTYPE_BITS
    if number not in Collective.__members__.values():
        return "an unknown call"
    collective = Collective(number)
    values = []
    if reduction != NO_REDUCTION:
        values += [describe_reduction(reduction), str(_DTYPES[dtype]).removeprefix("torch.")]
    if collective in (Collective.REDUCE, Collective.BROADCAST, Collective.GATHER, Collective.SCATTER):
        values.append(f"root {root}")
    unit = "values" if reduction != NO_REDUCTION else "bytes"
    if count & _UNEVEN:
        values.append(f"{unit} whose number differs by rank, with checksum {count ^ _UNEVEN:x}")
    elif count:
        values.append(f"{count} {unit}")
    return f"{collective.name.lower()}({', '.join(values)})"

"""What a user chooses for a table."""

from dataclasses import dataclass, field
from typing import Literal

from rankless.errors import TableError

DEFAULT_SHARDS = 1024
LEAST_SHARD_ROWS = 16
"""A cap of rows is divided over shards. With fewer rows per shard, ids would meet full shards too early."""


@dataclass(frozen=True, kw_only=True)
class Constant:
    """All elements of a new row have one value."""

    value: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Uniform:
    """The elements of a new row are uniformly distributed between `low` and `high`."""

    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Normal:
    """The elements of a new row are normally distributed, as `nn.Embedding`'s."""

    mean: float = 0.0
    std: float = 1.0


Initial = Constant | Uniform | Normal


@dataclass(frozen=True, kw_only=True)
class ByCount:
    """An id gets a row in the step with its `occurrences`-th occurrence in training, which trains it already."""

    occurrences: int


@dataclass(frozen=True, kw_only=True)
class ByHash:
    """An id gets a row if a hash of it and of the table's seed falls within `fraction`, always or never."""

    fraction: float


Admission = ByCount | ByHash


@dataclass(frozen=True, kw_only=True)
class TableSettings:
    """A table of rows by 64-bit ids.

    Args:
        dim: Elements of a row.
        dtype: Type of an element.
        seed: Initial values depend on it and on the id alone. From 0 to 2**64 - 1.
        initial: Distribution of initial values.
        admission: Which ids get a row. None: all that occur in training.
        expire_after_steps: A row or an occurrence count that no step has used for more than this number of steps is
            removed, at the latest after as many steps again. None: never.
        max_rows: Most rows. Beyond it, those that have been unused for longest are removed. The cap is divided over
            shards, so that a shard may remove rows before the whole table is full. None: as many as memory holds.

    Raises:
        TableError: A value is out of range.
    """

    dim: int
    dtype: Literal["float32", "float64"] = "float32"
    seed: int = 0
    initial: Initial = field(default_factory=Normal)
    admission: Admission | None = None
    expire_after_steps: int | None = None
    max_rows: int | None = None

    def __post_init__(self) -> None:
        _require(self.dim >= 1, "dim of at least 1", self.dim)
        _require(self.dtype in ("float32", "float64"), "dtype float32 or float64", self.dtype)
        _require(0 <= self.seed < 2**64, "a seed from 0 to 2**64 - 1", self.seed)
        expiry = self.expire_after_steps
        _require(expiry is None or expiry >= 1, "expire_after_steps of at least 1", expiry)
        _require(self.max_rows is None or self.max_rows >= 1, "max_rows of at least 1", self.max_rows)
        if isinstance(self.admission, ByCount):
            _require(1 <= self.admission.occurrences < 2**24, "1 to 2**24 - 1 occurrences", self.admission.occurrences)
        if isinstance(self.admission, ByHash):
            _require(0 <= self.admission.fraction <= 1, "a fraction from 0 to 1", self.admission.fraction)

    @property
    def shard_bits(self) -> int:
        """Binary logarithm of the number of virtual shards. It depends on the settings alone."""
        most = DEFAULT_SHARDS if self.max_rows is None else min(DEFAULT_SHARDS, self.max_rows // LEAST_SHARD_ROWS)
        return max(most, 1).bit_length() - 1

    @property
    def shard_rows(self) -> int:
        """Most rows of one shard. 0: no cap."""
        return 0 if self.max_rows is None else max(1, self.max_rows >> self.shard_bits)


def _require(condition: bool, expected: str, found: object) -> None:
    if not condition:
        raise TableError(expected=expected, found=found, fix="change the settings of the table")

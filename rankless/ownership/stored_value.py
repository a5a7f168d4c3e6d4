"""A tensor whose elements are elsewhere, as in the files of a checkpoint, and can be read whole or by rows."""

import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from rankless.ownership.shard_layout import select_ranges


class TensorSource(Protocol):
    """Where elements are."""

    @property
    def name(self) -> str:
        """What errors call the tensor."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        ...

    @property
    def device(self) -> torch.device:
        """Where what is read lies."""
        ...

    def read(self) -> Tensor:
        """Return the whole tensor, which the caller owns."""
        ...

    def read_rows(self, dim: int, start: int, length: int) -> Tensor:
        """Return some rows along a dim, which the caller owns."""
        ...


class StoredValue:
    """The value of one tensor, or of several that share their memory, which is read when it is needed.

    Args:
        source: Where the elements are.
        readers: All tensors that are alive and not read yet, by id.
    """

    def __init__(self, source: TensorSource, readers: "weakref.WeakValueDictionary[int, Tensor]") -> None:
        self.name = source.name
        self.shape = source.shape
        self.dtype = source.dtype
        self.device = source.device
        self.source = source
        self.readers = readers
        self.whole: Tensor | None = None
        """The value, once something has read it that may change or keep it."""

    def gather(self) -> Tensor:
        """Return the whole value, and keep it. Changes of it are changes of the tensors."""
        if self.whole is None:
            self.whole = self.source.read()
        return self.whole

    def read(self) -> Tensor:
        """Return a whole value that the caller owns."""
        return self.source.read() if self.whole is None else self.whole.clone()

    def read_rows(self, dim: int, start: int, length: int) -> Tensor:
        """Return some rows along a dim, which the caller owns."""
        if self.whole is None:
            return self.source.read_rows(dim, start, length)
        return self.whole.narrow(dim, start, length).clone()

    def select(self, dim: int, ranges: Sequence[tuple[int, int]]) -> "StoredValue":
        """Return some ranges of rows along a dim as a value of its own, which is read when it is needed."""
        return StoredValue(SelectedRows(self, dim, ranges), weakref.WeakValueDictionary())


class SelectedRows:
    """Some ranges of rows of a value, one after the other, as a source.

    Args:
        value: The value.
        dim: The dim of the rows.
        ranges: The first row of each range, and the row after its last one.
    """

    def __init__(self, value: StoredValue, dim: int, ranges: Sequence[tuple[int, int]]) -> None:
        rows = sum(stop - start for start, stop in ranges)
        self.name = value.name
        self.shape = (*value.shape[:dim], rows, *value.shape[dim + 1 :])
        self.dtype = value.dtype
        self.device = value.device
        self._value = value
        self._dim = dim
        self._ranges = tuple(ranges)

    def read(self) -> Tensor:
        """Return all of them."""
        return self._read(self._ranges)

    def read_rows(self, dim: int, start: int, length: int) -> Tensor:
        """Return some rows along a dim."""
        if dim == self._dim:
            return self._read(select_ranges(self._ranges, [(start, start + length)]))
        return self.read().narrow(dim, start, length).clone()

    def _read(self, ranges: Sequence[tuple[int, int]]) -> Tensor:
        rows = [self._value.read_rows(self._dim, start, stop - start) for start, stop in ranges]
        if not rows:
            return self._value.read_rows(self._dim, 0, 0)
        return rows[0] if len(rows) == 1 else torch.cat(rows, self._dim)


class ConvertedSource:
    """A source in another dtype, or on another device.

    Args:
        source: The source to convert.
        dtype: The dtype.
        device: The device.
    """

    def __init__(self, source: TensorSource, dtype: torch.dtype, device: torch.device) -> None:
        self.name = source.name
        self.shape = source.shape
        self.dtype = dtype
        self.device = device
        self._source = source

    def read(self) -> Tensor:
        """Return the whole tensor."""
        return self._source.read().to(device=self.device, dtype=self.dtype)

    def read_rows(self, dim: int, start: int, length: int) -> Tensor:
        """Return some rows along a dim."""
        return self._source.read_rows(dim, start, length).to(device=self.device, dtype=self.dtype)

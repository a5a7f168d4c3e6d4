"""Rows by ids that are in several files: the last file that has an id decides."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import torch
from numpy.typing import NDArray
from torch import Tensor

from rankless.checkpoint.file_io import damaged_file_error
from rankless.checkpoint.manifest import LayeredRows, TensorReference

CHUNK_ROWS = 1 << 16
"""Rows that are looked at once, so that the memory that it takes does not grow with the table."""
CPU = torch.device("cpu")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Numbers = NDArray[np.int64]
Bits = NDArray[np.integer[Any]]


class _Layer(NamedTuple):
    file: Path
    columns: dict[str, Tensor]
    """By name, in the memory of the mapped file."""
    bits: dict[str, Bits]
    """The same, as `bits_of` gives them."""
    first: int
    """The number of rows in earlier files."""


class StoredRows:
    """Rows by ids, of some files.

    Args:
        folder: Where the files are.
        table: What they hold. Fewer layers than the checkpoint has are an earlier state of the rows.
        opened: The open files of safetensors, by name.

    Raises:
        CheckpointError: They do not belong together.

    Attributes:
        ids: The ids, of shape (n,), in rising order.
        stored_rows: How many rows the files have, with those that later files replace.
    """

    def __init__(self, folder: Path, table: LayeredRows, opened: Mapping[str, Any]) -> None:
        self.table = table
        self._layers: list[_Layer] = []
        self.ids: Numbers = np.empty(0, np.int64)
        self._places: Numbers = np.empty(0, np.int64)
        """Where each row is, counted through all files."""
        self.stored_rows = 0
        for name in table.layers:
            try:
                columns = {each: opened[name].get_tensor(each) for each in table.tensors}
                removed = opened[name].get_tensor(table.removed) if self._layers else columns[table.ids][:0]
            except (OSError, safetensors.SafetensorError) as error:
                raise damaged_file_error(folder / name, f"{type(error).__name__}: {error}") from error
            self._check(folder / name, columns, removed)
            bits = {each: bits_of(column) for each, column in columns.items()}
            layer = _Layer(folder / name, columns, bits, self.stored_rows)
            self._layers.append(layer)
            self._apply(layer, removed.numpy())
            self.stored_rows += len(bits[table.ids])

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return (len(self.ids), *self._layers[0].columns[name].shape[1:])

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self._layers[0].columns[name].dtype

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return the rows of a tensor from `start` to before `stop`, in the order of ids."""
        shape = (stop - start, *self.shape_of(name)[1:])
        if start == stop:  # NumPy gives it strides of 0
            return torch.empty(shape, dtype=self.dtype_of(name), device="cpu")
        if name == self.table.ids:
            return torch.from_numpy(self.ids[start:stop].copy())
        bits = np.empty((stop - start, self._layers[0].bits[name].shape[1]), self._layers[0].bits[name].dtype)
        for first in range(start, stop, CHUNK_ROWS):
            last = min(first + CHUNK_ROWS, stop)
            bits[first - start : last - start] = self.read_bits(name, slice(first, last))
        return torch.from_numpy(bits).view(self.dtype_of(name)).reshape(shape)

    def read_bits(self, name: str, numbers: Numbers | slice) -> Bits:
        """Return the bits of rows of a tensor; see `bits_of`. `numbers` counts them in the order of ids."""
        places = self._places[numbers]
        first = self._layers[0].bits[name]
        rows = (
            first[np.minimum(places, len(first) - 1)]
            if len(first)
            else np.empty((len(places), first.shape[1]), first.dtype)
        )
        for layer in self._layers[1:]:
            column = layer.bits[name]
            (held,) = np.nonzero((places >= layer.first) & (places < layer.first + len(column)))
            rows[held] = column[places[held] - layer.first]
        return rows

    def _check(self, file: Path, columns: Mapping[str, Tensor], removed: Tensor) -> None:
        ids = columns[self.table.ids]
        first = self._layers[0].columns if self._layers else columns
        fits = ids.dim() == removed.dim() == 1 and all(
            column.dim() > 0
            and len(column) == len(ids)
            and column.shape[1:] == first[name].shape[1:]
            and column.dtype == first[name].dtype
            for name, column in columns.items()
        )
        if not fits or {ids.dtype, removed.dtype} != {torch.int64}:
            raise damaged_file_error(file, "tensors of other shapes or dtypes than the rows of a table")
        if not all(is_rising(each.numpy()) for each in (ids, removed)):
            raise damaged_file_error(file, "ids that do not rise")

    def _apply(self, layer: _Layer, removed: Numbers) -> None:
        """Take the rows of a file."""
        if len(removed):
            numbers, known = find_ids(self.ids, removed)
            if not known.all():
                raise damaged_file_error(layer.file, "an id to remove that no earlier file has")
            self.ids, self._places = np.delete(self.ids, numbers), np.delete(self._places, numbers)
        ids = layer.columns[self.table.ids].numpy()
        places = np.arange(layer.first, layer.first + len(ids))
        if not self._layers[1:]:
            self.ids, self._places = ids, places
            return
        numbers, known = find_ids(self.ids, ids)
        self._places[numbers[known]] = places[known]
        new, new_places = ids[~known], places[~known]
        if len(new):
            before = np.searchsorted(self.ids, new)
            self.ids, self._places = np.insert(self.ids, before, new), np.insert(self._places, before, new_places)


class RowsColumn:
    """One tensor of a checkpoint with a row for each id. It is a `TensorSource`.

    Args:
        reference: Its name, dtype and shape.
        rows: The rows of its table.

    Raises:
        CheckpointError: The files have another shape or dtype.
    """

    device = CPU
    is_small_integer = False

    def __init__(self, reference: TensorReference, rows: StoredRows, folder: Path) -> None:
        self.name = reference.name
        self.shape = reference.shape
        self.dtype: torch.dtype = getattr(torch, reference.dtype)
        self._rows = rows
        found = (rows.shape_of(self.name), rows.dtype_of(self.name))
        if found != (self.shape, self.dtype):
            raise damaged_file_error(
                folder / rows.table.layers[-1],
                f"{self.name}, {found[1]} {found[0]}, for {self.dtype} {self.shape} in the manifest",
            )

    def read(self) -> Tensor:
        """Return the whole tensor."""
        with torch.inference_mode(False), torch.no_grad():
            return self._rows.read(self.name, 0, len(self._rows.ids))

    def read_rows(self, dim: int, start: int, length: int) -> Tensor:
        """Return some rows along a dim."""
        with torch.inference_mode(False), torch.no_grad():
            if dim == 0:
                return self._rows.read(self.name, start, start + length)
            return self.read().narrow(dim, start, length).clone()


def find_ids(ids: Numbers, wanted: Numbers) -> tuple[Numbers, NDArray[np.bool_]]:
    """Return the number of each wanted id among ids, and whether it is there. Without it, the number means nothing.

    Args:
        ids: Rising ids, of shape (n,).
        wanted: Rising ids, of shape (m,).
    """
    if not len(ids):
        return np.zeros(len(wanted), np.int64), np.zeros(len(wanted), np.bool_)
    numbers = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
    return numbers, ids[numbers] == wanted


def is_rising(ids: Numbers) -> bool:
    """Return whether each id is greater than the one before."""
    return bool((ids[1:] > ids[:-1]).all())


def bits_of(rows: Tensor) -> Bits:
    """Return the bits of rows on a CPU as integers, of shape (rows, elements), in the memory of the tensor.

    As such, not a number is equal to itself, and 0 is not equal to -0. NumPy has no other types for some dtypes.
    """
    flat = rows.flatten(1) if rows.dim() > 1 else rows.unsqueeze(1)
    bits: Bits = flat.view(_INTEGERS[rows.element_size()]).numpy()
    return bits


def open_layers(folder: Path, layers: Sequence[str], opened: Any) -> dict[str, Any]:
    """Return open files of safetensors, by name.

    Args:
        folder: Where they are.
        layers: Their names.
        opened: An exit stack that closes them.

    Raises:
        CheckpointError: One cannot be read.
    """
    files = {}
    for name in layers:
        try:
            files[name] = opened.enter_context(safetensors.safe_open(folder / name, framework="pt"))
        except (OSError, safetensors.SafetensorError) as error:
            raise damaged_file_error(folder / name, f"{type(error).__name__}: {error}") from error
    return files

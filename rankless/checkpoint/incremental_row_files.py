"""Writes rows by ids into a checkpoint: those that have changed, beside the files of the checkpoint before.

# Note [changed rows]: what has changed is what differs, bit by bit, from the files of the checkpoint before. So nobody
# needs to count changes: not the functions that step rows, and not a server that may be killed. Expired rows, other
# optimizers, and tables that a script has assigned are found alike. To compare, a save reads those files and their
# checksums. So it also finds a damaged one, and then writes all rows anew.

# Note [links]: files that still hold are linked into the new folder. They are then files of both checkpoints, and each
# checkpoint may be removed. Nobody changes a file once it is written. Where a file system has no links, all rows are
# written.
"""

import contextlib
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import safetensors
import torch
from numpy.typing import NDArray
from torch import Tensor

from rankless.checkpoint.folder_commit import find_checkpoint
from rankless.checkpoint.manifest import LayeredRows, Manifest, Node, TensorFile, TensorReference, iterate_nodes
from rankless.checkpoint.manifest import Mapping as MappingNode
from rankless.checkpoint.manifest_io import check_file, damaged_file_error, open_tensors, read_manifest
from rankless.checkpoint.tensor_file_writer import TensorFileWriter
from rankless.errors import CheckpointError
from rankless.ownership.partitioned_tensor import find_partition

MOST_LAYERS = 8
"""More files of one table would make loads slow."""
MOST_STORED = 1.5
"""Files of a table hold at most this many times its rows, so that old rows take little space."""


class WrittenRows(NamedTuple):
    """What a save has written or linked, for its manifest."""

    files: list[TensorFile]
    tables: list[LayeredRows]


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


class _Changes(NamedTuple):
    """What differs between rows and earlier ones: the numbers of rows that are other or new, and ids that are gone."""

    earlier: StoredRows
    numbers: Numbers
    removed: Numbers


LEAST_BYTES = 1 << 20
"""Smaller ones are written with all other tensors."""
_COLUMNS = {"ids": ("rows", "used_steps"), "waiting_ids": ("waiting_occurrences", "waiting_steps")}
"""The keys of a table's state (`extensions.servers.tables.contents`): those of ids, and of what has a row for each."""


class KeyedRows(NamedTuple):
    """The names of a tensor of ids, and of the tensors that have a row for each."""

    ids: str
    columns: tuple[str, ...]

    @property
    def tensors(self) -> tuple[str, ...]:
        """All names."""
        return (self.ids, *self.columns)


def find_keyed_rows(nodes: Iterable[Node], tensors: Mapping[str, Tensor]) -> list[KeyedRows]:
    """Return the tensors that are to be written in layers of rows.

    Any mapping with these keys, rising ids and as many rows is read back as it was, whoever has made it.

    Args:
        nodes: The states of objects.
        tensors: Their tensors, by name.
    """
    found: list[KeyedRows] = []
    for node in (each for root in nodes for each in iterate_nodes(root) if isinstance(each, MappingNode)):
        mapping = dict(node.items)
        for key, columns in _COLUMNS.items():
            names = [_name_of(mapping.get(each)) for each in (key, *columns)]
            group = KeyedRows(names[0], tuple(names[1:]))
            taken = {name for each in found for name in each.tensors}
            if len(set(names) - taken) == len(names) and _are_rows([tensors.get(name) for name in names]):
                found.append(group)
    return found


def _name_of(node: Node) -> str:
    return node.name if isinstance(node, TensorReference) else ""


def _are_rows(tensors: Sequence[Tensor | None]) -> bool:
    found = [tensor for tensor in tensors if tensor is not None]
    if len(found) < len(tensors) or any(find_partition(tensor) is not None for tensor in found):
        return False
    ids = found[0]
    return (
        ids.dtype == torch.int64
        and ids.dim() == 1
        and all(tensor.dim() > 0 and len(tensor) == len(ids) for tensor in found)
        and sum(tensor.nbytes for tensor in found) >= LEAST_BYTES
        and is_rising(ids.cpu().numpy())
    )


def write_rows(folder: Path, groups: Sequence[KeyedRows], tensors: Mapping[str, Tensor], previous: Path) -> WrittenRows:
    """Write rows into a folder, or link files that have them.

    Args:
        folder: The folder of the new checkpoint, before its commit.
        groups: Which tensors.
        tensors: All of them by name, on any device.
        previous: Where the checkpoint before may be. If it cannot be read, all rows are written.

    Raises:
        OSError: The disk refuses it.
    """
    written = WrittenRows([], [])
    before = _read_before(previous)
    with torch.inference_mode(False), torch.no_grad():
        for group in groups:
            columns = {name: tensors[name].detach().cpu().contiguous() for name in group.tensors}
            known = None if before is None else _find_table(before[1], group)
            if before is None or known is None or not _write_changes(folder, columns, before, known, written):
                _write_layer(folder, LayeredRows(group.ids, list(group.columns), []), columns, written)
    return written


def _read_before(previous: Path) -> tuple[Path, Manifest] | None:
    """Return the folder and the manifest of the checkpoint before; None if it cannot be read."""
    try:
        folder = find_checkpoint(previous)
        return folder, read_manifest(folder)
    except CheckpointError:
        return None


def _find_table(manifest: Manifest, group: KeyedRows) -> LayeredRows | None:
    return next((table for table in manifest.tables if tuple(table.tensors) == group.tensors), None)


def _write_changes(
    folder: Path,
    columns: Mapping[str, Tensor],
    before: tuple[Path, Manifest],
    known: LayeredRows,
    written: WrittenRows,
) -> bool:
    """Write what has changed, and link the rest. Return False if all rows are to be written."""
    earlier_folder, manifest = before
    entries = {entry.name: entry for entry in manifest.files}
    with contextlib.ExitStack() as opened, contextlib.suppress(CheckpointError):
        for name in known.layers:
            check_file(earlier_folder / name, entries[name])
        files = {name: opened.enter_context(open_tensors(earlier_folder / name)) for name in known.layers}
        for layers in (known.layers, known.layers[:1])[: len(known.layers)]:
            earlier = StoredRows(earlier_folder, msgspec.structs.replace(known, layers=layers), files)
            changes = _compare(columns, earlier)
            if changes is not None and _is_worth(changes, len(columns[known.ids])):
                if not _link(earlier_folder, folder, layers):
                    return False
                written.files.extend(entries[name] for name in layers)
                chosen = torch.from_numpy(changes.numbers)
                changed = {name: column[chosen] for name, column in columns.items()}
                if len(changes.numbers) or len(changes.removed):
                    changed[known.removed] = torch.from_numpy(changes.removed)
                _write_layer(folder, earlier.table, changed, written)
                return True
    return False


def _is_worth(changes: _Changes, rows: int) -> bool:
    """Return whether changes are to be written, and not all rows."""
    written = len(changes.numbers) + len(changes.removed)
    layers = len(changes.earlier.table.layers) + bool(written)
    return layers <= MOST_LAYERS and changes.earlier.stored_rows + written <= MOST_STORED * rows


def _compare(columns: Mapping[str, Tensor], earlier: StoredRows) -> _Changes | None:
    """Return what has changed; None if the rows have other shapes or dtypes."""
    names = earlier.table.columns
    if any(
        (earlier.shape_of(name)[1:], earlier.dtype_of(name)) != (columns[name].shape[1:], columns[name].dtype)
        for name in names
    ):
        return None
    ids = columns[earlier.table.ids].numpy()
    bits = {name: bits_of(columns[name]) for name in names}
    numbers, known = find_ids(earlier.ids, ids)
    changed = ~known
    for start in range(0, len(ids), CHUNK_ROWS):
        held = start + np.nonzero(known[start : start + CHUNK_ROWS])[0]
        for name in names:
            changed[held] |= (bits[name][held] != earlier.read_bits(name, numbers[held])).any(1)
    remaining = np.zeros(len(earlier.ids), np.bool_)
    remaining[numbers[known]] = True
    return _Changes(earlier, np.nonzero(changed)[0], earlier.ids[~remaining])


def _link(earlier_folder: Path, folder: Path, layers: Sequence[str]) -> bool:
    """Link files into a folder; see Note [links]. Return whether the file system can."""
    linked: list[Path] = []
    try:
        for name in layers:
            os.link(earlier_folder / name, folder / name, follow_symlinks=False)
            linked.append(folder / name)
    except OSError:
        for file in linked:
            file.unlink()
        return False
    return True


def _write_layer(folder: Path, table: LayeredRows, columns: Mapping[str, Tensor], written: WrittenRows) -> None:
    """Write a file of rows, unless nothing has changed, and note the table."""
    is_needed = not table.layers or table.removed in columns
    if is_needed:
        name = f"rows-{uuid.uuid4().hex}.safetensors"
        writer = TensorFileWriter(folder / name, columns, {})
        try:
            for each, column in columns.items():
                writer.write(each, column)
            written.files.append(writer.finish())
        finally:
            writer.close()
        table = msgspec.structs.replace(table, layers=[*table.layers, name])
    written.tables.append(table)

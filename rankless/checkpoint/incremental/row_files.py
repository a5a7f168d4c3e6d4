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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from rankless.checkpoint.file_io import check_file, read_manifest
from rankless.checkpoint.folder import find_checkpoint
from rankless.checkpoint.incremental.stored_rows import (
    CHUNK_ROWS,
    Numbers,
    StoredRows,
    bits_of,
    find_ids,
    is_rising,
    open_layers,
)
from rankless.checkpoint.manifest import LayeredRows, Manifest, Node, TensorFile, TensorReference
from rankless.checkpoint.manifest import Mapping as MappingNode
from rankless.checkpoint.manifest import Sequence as SequenceNode
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


class _Changes(NamedTuple):
    """What differs between rows and earlier ones: the numbers of rows that are other or new, and ids that are gone."""

    earlier: StoredRows
    numbers: Numbers
    removed: Numbers


LEAST_BYTES = 1 << 20
"""Smaller ones are written with all other tensors."""
_COLUMNS = {"ids": ("rows", "used_steps"), "waiting_ids": ("waiting_occurrences", "waiting_steps")}
"""The keys of a table's state (`parameter_server.tables.contents`): those of ids, and of what has a row for each."""


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
    for node in nodes:
        for mapping in _list_mappings(node):
            for key, columns in _COLUMNS.items():
                names = [_name_of(mapping.get(each)) for each in (key, *columns)]
                group = KeyedRows(names[0], tuple(names[1:]))
                taken = {name for each in found for name in each.tensors}
                if len(set(names) - taken) == len(names) and _are_rows([tensors.get(name) for name in names]):
                    found.append(group)
    return found


def _list_mappings(node: Node) -> Iterator[dict[int | str, Node]]:
    if isinstance(node, SequenceNode):
        for item in node.items:
            yield from _list_mappings(item)
    elif isinstance(node, MappingNode):
        yield dict(node.items)
        for _, item in node.items:
            yield from _list_mappings(item)


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
        files = open_layers(earlier_folder, known.layers, opened)
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

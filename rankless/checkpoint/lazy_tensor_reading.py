"""The tensors of a checkpoint's files, of which each is read when it is needed: whole, or some of its rows."""

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from rankless.checkpoint.incremental_row_files import RowsColumn, StoredRows
from rankless.checkpoint.manifest import MANIFEST_NAME, Manifest, TensorFile, TensorPiece, TensorReference
from rankless.checkpoint.manifest_io import check_file, damaged_file_error, open_tensors
from rankless.checkpoint.tensor_file_writer import ELEMENT_CODES, STORED_AS, describe_stored, restore_dtype
from rankless.ownership.stored_value import StoredValue
from rankless.ownership.unread_tensor import UnreadTensor, settle

SMALL_BYTES = 64 << 10
"""Tensors of integers up to this size are read at once: PyTorch's generators take their states as such."""
CPU = torch.device("cpu")
DTYPE_NAMES = {code: str(dtype).removeprefix("torch.") for dtype, code in ELEMENT_CODES.items()}


@dataclass(frozen=True, kw_only=True)
class StoredPart:
    """A tensor of a file: a whole one, or a piece."""

    file: Path
    name: str
    opened: Any
    """The open file of safetensors."""
    piece: TensorPiece | None
    dtype: torch.dtype
    """That of the tensor, which the file may hold as another one."""

    def check(self, reference: TensorReference) -> None:
        """Raise `CheckpointError` unless the file has what the manifest says."""
        shape = reference.shape if self.piece is None else self.piece.piece_shape
        stored = self.opened.get_slice(self.name)
        found = f"{DTYPE_NAMES.get(stored.get_dtype())} {tuple(stored.get_shape())}"
        code, stored_shape = describe_stored(self.dtype, shape)
        is_of_whole = self.piece is None or self.piece.shape == reference.shape
        if found != f"{DTYPE_NAMES[code]} {tuple(stored_shape)}" or not is_of_whole:
            wanted = f"{reference.dtype} {reference.shape}"
            raise damaged_file_error(self.file, f"{self.name}, {found}, for {wanted} in the manifest")

    def view(self) -> Tensor:
        """Return the tensor in the memory of the mapped file, which follows the file."""
        with self._read_errors():
            return restore_dtype(self.opened.get_tensor(self.name), self.dtype)

    def view_rows(self, dim: int, start: int, stop: int) -> Tensor:
        """Return some rows in the memory of the mapped file."""
        with self._read_errors():
            found: Tensor = self.opened.get_slice(self.name)[(*[slice(None)] * dim, slice(start, stop))]
            return restore_dtype(found, self.dtype)

    @contextlib.contextmanager
    def _read_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, safetensors.SafetensorError) as error:
            raise damaged_file_error(self.file, f"{type(error).__name__}: {error}") from error


class FileTensor:
    """One tensor of a checkpoint: whole in a file, or in pieces in some files. It is a `TensorSource`.

    Args:
        reference: Its name, dtype and shape.
        parts: Where its elements are.
    """

    device = CPU

    def __init__(self, reference: TensorReference, parts: Sequence[StoredPart]) -> None:
        self.name = reference.name
        self.shape = reference.shape
        self.dtype: torch.dtype = getattr(torch, reference.dtype)
        self._parts = parts

    @property
    def is_small_integer(self) -> bool:
        """Whether it is read at once."""
        is_real = self.dtype.is_floating_point or self.dtype.is_complex
        size = torch.Size(self.shape).numel() * self.dtype.itemsize
        return not self.shape or (not is_real and size <= SMALL_BYTES)

    def read(self) -> Tensor:
        """Return the whole tensor."""
        with torch.inference_mode(False), torch.no_grad():
            if self._parts[0].piece is None:
                return self._parts[0].view().clone(memory_format=torch.contiguous_format)
            whole = torch.empty(self.shape, dtype=self.dtype, device="cpu")
            for part in self._parts:
                assert part.piece is not None
                whole[part.piece.box].copy_(part.view())
            return whole

    def read_rows(self, dim: int, start: int, length: int) -> Tensor:
        """Return some rows along a dim, whatever rows the pieces have."""
        stop = start + length
        with torch.inference_mode(False), torch.no_grad():
            rows = torch.empty((*self.shape[:dim], length, *self.shape[dim + 1 :]), dtype=self.dtype, device="cpu")
            for part in self._parts if rows.numel() else ():
                if part.piece is None:
                    rows.copy_(part.view_rows(dim, start, stop))
                    continue
                box = list(part.piece.box)
                first, last = max(start, box[dim].start), min(stop, box[dim].stop)
                if first < last:
                    found = part.view_rows(dim, first - box[dim].start, last - box[dim].start)
                    box[dim] = slice(first - start, last - start)
                    rows[tuple(box)].copy_(found)
            return rows


class StoredTensors:
    """The tensors that some references name. Use it within a `with`, which keeps the files open.

    Args:
        folder: The checkpoint.
        manifest: Its manifest.
        references: The tensors that are needed. Files that hold none of them are not read.
    """

    def __init__(self, folder: Path, manifest: Manifest, references: Iterable[TensorReference]) -> None:
        self._folder = folder
        self._files = manifest.files
        self._tables = manifest.tables
        self._references = list(references)
        self._names = {reference.name for reference in self._references}
        self._sources: dict[str, FileTensor | RowsColumn] = {}
        self._alive: weakref.WeakValueDictionary[str, Tensor] = weakref.WeakValueDictionary()
        self._readers: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self._opened = contextlib.ExitStack()

    def __enter__(self) -> "StoredTensors":
        return self

    def __exit__(self, *_error: object) -> None:
        self._opened.close()

    def open(self) -> None:
        """Open the files. Raises `CheckpointError` unless they are intact and have what is needed."""
        parts: dict[str, list[StoredPart]] = {}
        dtypes = {each.name: self._find_dtype(each) for each in self._references}
        layers = {name for table in self._tables for name in table.layers}
        held = [(entry, self._find_needed(entry)) for entry in self._files if entry.name not in layers]
        for entry, needed in held:
            if needed:
                check_file(self._folder / entry.name, entry)
        for entry, needed in held:
            opened = self._open_file(entry) if needed else None
            for name in needed:
                piece = entry.pieces.get(name)
                whole = name if piece is None else piece.tensor
                part = StoredPart(
                    file=self._folder / entry.name, name=name, opened=opened, piece=piece, dtype=dtypes[whole]
                )
                parts.setdefault(whole, []).append(part)
        self._open_tables()
        for reference in self._references:
            if reference.name in self._sources:
                continue
            if reference.name not in parts:
                raise damaged_file_error(
                    self._folder / MANIFEST_NAME, f"{reference.name}, but no such tensor in a file"
                )
            for part in parts[reference.name]:
                part.check(reference)
            self._sources[reference.name] = FileTensor(reference, parts[reference.name])

    def _open_tables(self) -> None:
        """Open the files of rows that are needed."""
        entries = {entry.name: entry for entry in self._files}
        for table in self._tables:
            needed = [reference for reference in self._references if reference.name in table.tensors]
            if needed:
                for name in table.layers:
                    check_file(self._folder / name, entries[name])
                rows = StoredRows(self._folder, table, {name: self._open_file(entries[name]) for name in table.layers})
                self._sources |= {each.name: RowsColumn(each, rows, self._folder) for each in needed}

    def get(self, name: str) -> Tensor:
        """Return a tensor, whose elements are read when something needs them. It is the same while it is in use."""
        made = self._alive.get(name)
        if made is None:
            source = self._sources[name]
            made = source.read() if source.is_small_integer else UnreadTensor(StoredValue(source, self._readers))
            self._alive[name] = made
        return made

    def find(self, name: str) -> FileTensor | RowsColumn:
        """Return where the elements of a tensor are."""
        return self._sources[name]

    def settle(self) -> None:
        """Give all tensors that are still in use their values, one after the other."""
        settle(list(self._readers.values()))

    def _find_dtype(self, reference: TensorReference) -> torch.dtype:
        dtype = getattr(torch, reference.dtype, None)
        if isinstance(dtype, torch.dtype) and (dtype in ELEMENT_CODES or dtype in STORED_AS):
            return dtype
        raise damaged_file_error(self._folder / MANIFEST_NAME, f"{reference.name} of dtype {reference.dtype!r:.40}")

    def _find_needed(self, entry: TensorFile) -> list[str]:
        names = ((name, entry.pieces.get(name)) for name in entry.tensors)
        return [name for name, piece in names if (name if piece is None else piece.tensor) in self._names]

    def _open_file(self, entry: TensorFile) -> Any:
        file = self._folder / entry.name
        opened = self._opened.enter_context(open_tensors(file))
        if sorted(opened.keys()) != sorted(entry.tensors):
            raise damaged_file_error(file, "other tensors than the manifest lists")
        return opened

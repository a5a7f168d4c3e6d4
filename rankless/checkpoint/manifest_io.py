"""The files of a checkpoint: written to survive a power failure, read without trust."""

import hashlib
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
import safetensors

from rankless.checkpoint.manifest import (
    FORMAT,
    MANIFEST_NAME,
    READABLE_VERSIONS,
    TENSORS_NAME,
    Manifest,
    Preamble,
    RowRange,
    TensorFile,
    TensorPiece,
    encode_manifest,
    has_valid_checksum,
)
from rankless.errors import CheckpointError
from rankless.version import VERSION as RANKLESS_VERSION

Header = TypeVar("Header", bound=msgspec.Struct)

MANIFEST_LIMIT_BYTES = 256 << 20
"""Longer than any manifest we write (a million tensors). A longer one could fill the memory before its check."""


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, and sync it and `folder`."""
    file = folder / MANIFEST_NAME
    file.write_bytes(encode_manifest(manifest))
    sync(file)
    sync(folder)


def sync(path: Path) -> None:
    """Return when a file, or the list of a folder's files, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint after checks of format, version, checksum and file names."""
    file = folder / MANIFEST_NAME
    data = _manifest_bytes(folder)
    try:
        preamble = msgspec.json.decode(data, type=Preamble)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _not_a_checkpoint_error(folder, f"a {MANIFEST_NAME} that cannot be read ({error})") from error
    if preamble.format != FORMAT:
        raise _not_a_checkpoint_error(folder, f"a {MANIFEST_NAME} of format {preamble.format!r:.80}")
    if preamble.version not in READABLE_VERSIONS:
        raise CheckpointError(
            expected=f"a checkpoint of version {' or '.join(map(str, READABLE_VERSIONS))}, in {folder}",
            found=f"version {preamble.version}",
            fix=f"load it with the version of Rankless that wrote it; this is {RANKLESS_VERSION}",
        )
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
        is_valid = has_valid_checksum(data, manifest)
    except (msgspec.DecodeError, UnicodeError, ValueError, OverflowError, RecursionError) as error:
        raise damaged_file_error(file, str(error)) from error
    if not is_valid:
        raise damaged_file_error(file, "contents that do not match its own checksum")
    _check_names(file, manifest)
    return manifest


def peek(folder: Path, header: type[Header]) -> Header | None:
    """Return some fields of a manifest without a check; None if they cannot be read."""
    try:
        return msgspec.json.decode(_manifest_bytes(folder), type=header)
    except (CheckpointError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def damaged_file_error(file: Path, found: str) -> CheckpointError:
    """Return the error for a file that is not as it was written."""
    return CheckpointError(
        expected=f"{file} as it was written",
        found=found,
        fix="the checkpoint is damaged: load another one",
    )


def check_file(file: Path, entry: TensorFile) -> None:
    """Raise `CheckpointError` unless a tensor file has the size and the checksum of its entry in the manifest."""
    try:
        with _open_regular(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size != entry.size_bytes:
                raise damaged_file_error(file, f"{size} bytes instead of {entry.size_bytes}")
            if compute_checksum(stream) != entry.sha256:
                raise damaged_file_error(file, "another checksum")
    except OSError as error:
        raise damaged_file_error(file, f"{type(error).__name__}: {error}") from error


def open_tensors(file: Path) -> Any:
    """Return an open file of safetensors, as a context that closes it. Raises `CheckpointError` for a damaged one."""
    try:
        return safetensors.safe_open(file, framework="pt")
    except (OSError, safetensors.SafetensorError) as error:
        raise damaged_file_error(file, f"{type(error).__name__}: {error}") from error


def _check_names(file: Path, manifest: Manifest) -> None:
    names = [entry.name for entry in manifest.files]
    foreign = [name for name in names if TENSORS_NAME.fullmatch(name) is None]
    layers = {name for table in manifest.tables for name in table.layers}
    tensors = [name for entry in manifest.files if entry.name not in layers for name in entry.tensors]
    tensors += [name for table in manifest.tables for name in table.tensors]
    if foreign:
        raise damaged_file_error(file, f"a tensor file called {foreign[0]!r:.80}")
    if len(set(names)) < len(names) or len(set(tensors)) < len(tensors):
        raise damaged_file_error(file, "a file or a tensor that it lists twice")
    if not manifest.random:
        raise damaged_file_error(file, "no random state")
    _check_layers(file, manifest)
    _check_pieces(file, manifest)


def _check_layers(file: Path, manifest: Manifest) -> None:
    """Raise `CheckpointError` unless each file of rows belongs to one table, and has its tensors."""
    entries = {entry.name: entry for entry in manifest.files}
    layers = [name for table in manifest.tables for name in table.layers]
    if len(set(layers)) < len(layers):
        raise damaged_file_error(file, "a file of rows that belongs to two tables")
    for table in manifest.tables:
        if not table.layers:
            raise damaged_file_error(file, f"no file of {table.ids}")
        for number, name in enumerate(table.layers):
            wanted = sorted([*table.tensors, *([table.removed] if number else [])])
            if name not in entries or entries[name].tensors != wanted or entries[name].pieces:
                raise damaged_file_error(file, f"{name!r:.80}, which does not have {', '.join(wanted)}")


def _check_pieces(file: Path, manifest: Manifest) -> None:
    """Raise `CheckpointError` unless the pieces of each tensor are its rows, each once."""
    whole = {name for entry in manifest.files for name in entry.tensors if name not in entry.pieces}
    found: dict[str, list[TensorPiece]] = {}
    for entry in manifest.files:
        for name, piece in entry.pieces.items():
            dims = [rows.dim for rows in piece.rows]
            if len(set(dims)) < len(dims) or not all(0 <= dim < len(piece.shape) for dim in dims):
                raise damaged_file_error(file, f"a piece called {name!r:.80}, with rows along the dims {dims!s:.80}")
            if name not in entry.tensors or name != piece.name:
                raise damaged_file_error(file, f"a piece called {name!r:.80}, which {entry.name} does not have")
            found.setdefault(piece.tensor, []).append(piece)
    for name, pieces in found.items():
        first = pieces[0]
        kinds = {(piece.shape, tuple(rows.dim for rows in piece.rows)) for piece in pieces}
        if name in whole or len(kinds) > 1:
            raise damaged_file_error(file, f"pieces of {name} that do not belong together")
        _check_rows(file, name, [piece.rows for piece in pieces], first.shape)


def _check_rows(file: Path, name: str, pieces: list[tuple[RowRange, ...]], shape: tuple[int, ...]) -> None:
    """Raise `CheckpointError` unless pieces have each row along their first dim once, and so on along the next.

    Args:
        file: The manifest.
        name: The tensor's name.
        pieces: The rows of each piece along the same dims, of which there is at least one.
        shape: The shape of the tensor.
    """
    groups: dict[tuple[int, int], list[tuple[RowRange, ...]]] = {}
    for first, *others in pieces:
        groups.setdefault((first.start, first.stop), []).append(tuple(others))
    rows, dim = 0, pieces[0][0].dim
    for (start, stop), inner in sorted(groups.items()):
        if start != rows or stop <= start:
            kind = "missing" if start > rows else "in two pieces"
            raise damaged_file_error(file, f"rows {min(rows, start)} to {max(rows, start)} of {name} {kind}")
        if len(inner) > 1 and not inner[0]:
            raise damaged_file_error(file, f"rows {start} to {stop} of {name} in two pieces")
        rows = stop
        if inner[0]:
            _check_rows(file, name, inner, shape)
    if rows != shape[dim]:
        raise damaged_file_error(file, f"pieces of {name} with {rows} rows instead of {shape[dim]}")


def _manifest_bytes(folder: Path) -> bytes:
    file = folder / MANIFEST_NAME
    try:
        with _open_regular(file) as stream:
            size = os.fstat(stream.fileno()).st_size  # a read takes memory for all that it may return
            data = stream.read(min(size, MANIFEST_LIMIT_BYTES) + 1)
    except FileNotFoundError as error:
        raise _not_a_checkpoint_error(folder, f"a folder without {MANIFEST_NAME}") from error
    except OSError as error:
        raise damaged_file_error(file, f"{type(error).__name__}: {error}") from error
    if len(data) > MANIFEST_LIMIT_BYTES:
        raise damaged_file_error(file, f"more than {MANIFEST_LIMIT_BYTES} bytes")
    return data


def _open_regular(file: Path) -> BinaryIO:
    """Open a file for reading. Raises `OSError` for a link, which may lead anywhere, or a pipe, which may not end."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("not a regular file")
    return open(descriptor, "rb")


def compute_checksum(stream: BinaryIO) -> str:
    """Return the SHA-256 of the rest of an open file."""
    return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]  # an open file is one


def _not_a_checkpoint_error(folder: Path, found: str) -> CheckpointError:
    return CheckpointError(
        expected=f"a checkpoint that rankless.save wrote, in {folder}",
        found=found,
        fix="pass the path of rankless.save",
    )

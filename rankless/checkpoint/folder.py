"""The folder on disk: written beside its place, committed by renaming, read back with every check.

# Note [commit]: the new checkpoint is written whole and synced to disk as the sibling `.NAME.new`. Then the
# old one is renamed to `.NAME.old`, the new one to `NAME`, and the old one removed. Killed at any point,
# `NAME` is the old or the new checkpoint, or it is missing and `.NAME.old` is the old one:
# `find_checkpoint` and the next save look there.
"""

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
import safetensors
import safetensors.torch
from torch import Tensor

from rankless.checkpoint.manifest import (
    FORMAT,
    MANIFEST_NAME,
    TENSORS_NAME,
    VERSION,
    Manifest,
    Node,
    Preamble,
    TensorFile,
    digest,
    seal,
)
from rankless.errors import CheckpointError
from rankless.version import VERSION as RANKLESS_VERSION


def write_checkpoint(path: str | os.PathLike[str], objects: dict[str, Node], tensors: dict[str, Tensor]) -> None:
    """Put a checkpoint at `path`, in place of the one there, which stays if CheckpointError is raised."""
    place = Path(os.path.realpath(path))
    new, old = _siblings(place)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.exists() and old.exists():
            old.rename(place)
        _refuse_foreign(place)
        _remove(new)
        new.mkdir()
        _write_files(new, objects, tensors)
        _remove(old)
        if place.exists():
            place.rename(old)
        new.rename(place)
        _sync_folder(place.parent)
        _remove(old)
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        raise CheckpointError(
            expected=f"to write a checkpoint at {place}",
            found=f"{type(error).__name__}: {error}",
            fix="free space there, or save to another folder; the checkpoint that was there before is kept",
        ) from error


def find_checkpoint(path: str | os.PathLike[str]) -> Path:
    """The folder to read for `path`: itself, or the old one kept aside by a save that was killed."""
    place = Path(os.path.realpath(path))
    _, old = _siblings(place)
    if not place.exists() and (old / MANIFEST_NAME).exists():
        return old
    if not place.is_dir():
        raise CheckpointError(
            expected=f"a checkpoint folder at {place}",
            found="a file" if place.exists() else "nothing there",
            fix="give the path that rankless.save was given",
        )
    return place


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, checked: its format, its version and its own checksum."""
    try:
        data = (folder / MANIFEST_NAME).read_bytes()
    except FileNotFoundError as error:
        raise _not_ours(folder, f"a folder without {MANIFEST_NAME}") from error
    try:
        preamble = msgspec.json.decode(data, type=Preamble)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_ours(folder, f"a {MANIFEST_NAME} that cannot be read ({error})") from error
    if preamble.format != FORMAT:
        raise _not_ours(folder, f"a {MANIFEST_NAME} of format {preamble.format!r}")
    if preamble.version != VERSION:
        raise CheckpointError(
            expected=f"a checkpoint of version {VERSION}, in {folder}",
            found=f"version {preamble.version}",
            fix=f"load it with the Rankless that wrote it; this one is {RANKLESS_VERSION}",
        )
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _damaged(folder / MANIFEST_NAME, str(error)) from error
    if digest(manifest) != manifest.sha256:
        raise _damaged(folder / MANIFEST_NAME, "contents that do not have the checksum written in it")
    return manifest


def read_tensors(folder: Path, files: list[TensorFile]) -> Mapping[str, Tensor]:
    """All tensors of a checkpoint by name, on the CPU, after their files' checksums were compared.

    They are mapped from the file and owned by nobody: clone what is kept.
    """
    tensors: dict[str, Tensor] = {}
    for entry in files:
        file = folder / entry.name
        try:
            found = _describe(file)
            if found != entry:
                size = f"{found.size_bytes} bytes instead of {entry.size_bytes}"
                raise _damaged(file, size if found.size_bytes != entry.size_bytes else "another checksum")
            tensors.update(safetensors.torch.load_file(file))
        except (OSError, safetensors.SafetensorError) as error:
            raise _damaged(file, f"{type(error).__name__}: {error}") from error
    return tensors


def _siblings(place: Path) -> tuple[Path, Path]:
    return place.with_name(f".{place.name}.new"), place.with_name(f".{place.name}.old")


def _refuse_foreign(place: Path) -> None:
    """A save replaces a whole folder, so what is not a checkpoint of ours must not be there."""
    if not place.exists():
        return
    if not place.is_dir():
        raise CheckpointError(
            expected=f"a checkpoint, an empty folder or nothing at {place}",
            found="a file",
            fix="save to another path, or remove it",
        )
    names = {entry.name for entry in place.iterdir()}
    foreign = sorted(names - {MANIFEST_NAME, TENSORS_NAME})
    if foreign or (names and MANIFEST_NAME not in names):
        raise CheckpointError(
            expected=f"a checkpoint, an empty folder or nothing at {place}",
            found=f"a folder with {', '.join((foreign or sorted(names))[:5])}",
            fix="save to another path: the whole folder would be replaced",
        )


def _write_files(folder: Path, objects: dict[str, Node], tensors: dict[str, Tensor]) -> None:
    """The tensors, then the manifest that vouches for them; all on disk when this returns."""
    tensor_file = folder / TENSORS_NAME
    safetensors.torch.save_file(tensors, tensor_file, metadata={"format": "pt"})
    _sync(tensor_file)
    manifest = Manifest(rankless=RANKLESS_VERSION, files=[_describe(tensor_file)], objects=objects)
    manifest_file = folder / MANIFEST_NAME
    manifest_file.write_bytes(seal(manifest))
    _sync(manifest_file)
    _sync_folder(folder)


def _describe(file: Path) -> TensorFile:
    with file.open("rb") as stream:
        checksum = hashlib.file_digest(stream, "sha256").hexdigest()
    return TensorFile(name=file.name, size_bytes=file.stat().st_size, sha256=checksum)


def _sync(file: Path) -> None:
    with file.open("rb+") as stream:
        os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _not_ours(folder: Path, found: str) -> CheckpointError:
    return CheckpointError(
        expected=f"a checkpoint that rankless.save wrote, in {folder}",
        found=found,
        fix="give the path that rankless.save was given",
    )


def _damaged(file: Path, found: str) -> CheckpointError:
    return CheckpointError(
        expected=f"{file} as it was written",
        found=found,
        fix="the checkpoint is damaged: load another one",
    )

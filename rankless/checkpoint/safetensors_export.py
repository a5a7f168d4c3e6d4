"""Writes an export into one safetensors file, or into several with an index, as Hugging Face's libraries read them.

# Note [several files]: an export `NAME.safetensors` beyond the limit is in `NAME-00001-of-00003.safetensors` and so on.
# `NAME.safetensors.index.json` says which file has which tensor. No tensor is divided: one that is larger
# than the limit has a file of its own.
"""

import contextlib
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from rankless.checkpoint.checkpoint_series import CheckpointDirectory
from rankless.checkpoint.folder_commit import find_checkpoint
from rankless.checkpoint.lazy_tensor_reading import StoredTensors
from rankless.checkpoint.manifest import Manifest, Node, SparseReference, TensorReference
from rankless.checkpoint.manifest import Mapping as MappingNode
from rankless.checkpoint.manifest import Sequence as SequenceNode
from rankless.checkpoint.manifest_io import read_manifest, sync
from rankless.checkpoint.tensor_file_writer import TensorFileWriter
from rankless.errors import CheckpointError

SUFFIX = ".safetensors"
PART_BYTES = 4 << 20
"""What is in memory of a tensor at once."""


class ExportResult(NamedTuple):
    """What an export has written.

    Attributes:
        files: The files, with the index if there is one.
        tensors: The number of tensors.
        tensor_bytes: Their bytes.
        left_out: The names of saved objects that are not exported.
    """

    files: list[Path]
    tensors: int
    tensor_bytes: int
    left_out: list[str]


_TABLE_KEYS = {"ids", "rows", "used_steps", "optimizer", "seed"}
_EXTRA_STATE = "_extra_state."


@dataclass(frozen=True, kw_only=True)
class ExportedTensor:
    """A tensor of an export.

    Attributes:
        name: Its name there.
        source: The name of the checkpoint's tensor.
        dtype: Its dtype.
        shape: Its shape.
        columns: Which elements of each row it has, along the second dim. None: all.
    """

    name: str
    source: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    columns: slice | None = None

    @property
    def empty(self) -> Tensor:
        """A tensor without elements of the same dtype and shape."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def select(self, rows: Tensor) -> Tensor:
        """Return what it has of rows of its source."""
        return rows if self.columns is None else rows[:, self.columns]


class ExportContent(NamedTuple):
    """What an export has, and the names of the objects that it leaves out."""

    tensors: list[ExportedTensor]
    references: list[TensorReference]
    left_out: list[str]


@dataclass(frozen=True, kw_only=True)
class ExportChoice:
    """What to export of a checkpoint.

    Attributes:
        objects: Names of saved objects. None: all modules.
        with_states: Whether states of optimizers are exported, those of modules' and those of tables.
        state_counts: By the name of a table's optimizer, how many states as long as its values a row has.
    """

    objects: Sequence[str] | None = None
    with_states: bool = False
    state_counts: Mapping[str, int]


def list_exported(manifest: Manifest, choice: ExportChoice) -> ExportContent:
    """Return what an export of a checkpoint has. Raises CheckpointError if that is nothing, or objects are unknown."""
    chosen = _choose_objects(manifest, choice)
    found = [pair for name in chosen for pair in _list_tensors(manifest.objects[name], choice)]
    references = {reference.name: reference for _, reference in found}
    tensors: dict[str, ExportedTensor] = {}
    # Tables come last: only they have other names than in the checkpoint, which a module's own tensors may have too.
    for tensor, _ in sorted(found, key=lambda pair: pair[0].name != pair[0].source):
        known = tensors.setdefault(tensor.name, tensor)
        if known != tensor:
            other = f"{tensor.source}.{tensor.name.rpartition('.')[2]}"
            tensors[other] = replace(tensor, name=other)
    left_out = [name for name in manifest.objects if name not in chosen]
    if not tensors:
        raise CheckpointError(
            expected="a checkpoint with a module's tensors",
            found=f"none in {', '.join(chosen) or 'it'}; the objects are {', '.join(manifest.objects) or 'none'}",
            fix="name objects that have tensors with --objects",
        )
    return ExportContent(list(tensors.values()), list(references.values()), left_out)


def _choose_objects(manifest: Manifest, choice: ExportChoice) -> list[str]:
    if choice.objects is not None:
        unknown = [name for name in choice.objects if name not in manifest.objects]
        if unknown:
            raise CheckpointError(
                expected=f"names of saved objects: {', '.join(manifest.objects) or 'none'}",
                found=", ".join(unknown),
                fix="choose among these in --objects",
            )
        return list(choice.objects)
    return [
        name
        for name, node in manifest.objects.items()
        if _is_module(node) or (choice.with_states and _is_optimizer(node))
    ]


def _is_module(node: Node) -> bool:
    """Return whether a node is the state of a module: PyTorch gives it an ordered dict with metadata."""
    return isinstance(node, MappingNode) and node.type == "ordered" and node.metadata is not None


def _is_optimizer(node: Node) -> bool:
    return isinstance(node, MappingNode) and {"state", "param_groups"} <= set(dict(node.items))


def _list_tensors(node: Node, choice: ExportChoice) -> Iterator[tuple[ExportedTensor, TensorReference]]:
    if isinstance(node, TensorReference):
        yield _whole(node, node.name), node
    elif isinstance(node, SparseReference):
        for part in (node.indices, node.values):
            yield _whole(part, part.name), part
    elif isinstance(node, SequenceNode):
        for item in node.items:
            yield from _list_tensors(item, choice)
    elif isinstance(node, MappingNode):
        values = dict(node.items)
        if set(values) >= _TABLE_KEYS:
            yield from _list_table(values, choice)
            return
        stand_ins = {f"{str(key).removesuffix('_extra_state')}weight" for key, item in node.items if _is_table(item)}
        for key, item in node.items:
            if key not in stand_ins:
                yield from _list_tensors(item, choice)


def _is_table(node: Node) -> bool:
    return isinstance(node, MappingNode) and set(dict(node.items)) >= _TABLE_KEYS


def _list_table(values: Mapping[Any, Node], choice: ExportChoice) -> Iterator[tuple[ExportedTensor, TensorReference]]:
    """Yield the ids, the values and, if they are wanted, the optimizer's states of a table."""
    ids, rows, optimizer = values["ids"], values["rows"], values["optimizer"]
    states = choice.state_counts.get(str(optimizer))
    if not isinstance(ids, TensorReference) or not isinstance(rows, TensorReference) or len(rows.shape) != 2:
        raise CheckpointError(
            expected="a table's ids and rows", found="other values", fix="the checkpoint is damaged: export another one"
        )
    if states is None or rows.shape[1] % (1 + states):
        raise CheckpointError(
            expected=f"a table's rows with the states of one of {', '.join(filter(None, choice.state_counts))}",
            found=f"{optimizer!r} and rows of {rows.shape[1]} elements, in {rows.name}",
            fix="export with the version of Rankless that wrote the checkpoint",
        )
    prefix = ids.name.removesuffix("ids").removesuffix(_EXTRA_STATE)
    dim = rows.shape[1] // (1 + states)
    yield _whole(ids, f"{prefix}ids"), ids
    yield _columns(rows, f"{prefix}rows", 0, dim), rows
    if choice.with_states and states:
        yield _columns(rows, f"{prefix}states", dim, rows.shape[1]), rows


def _whole(reference: TensorReference, name: str) -> ExportedTensor:
    dtype: torch.dtype = getattr(torch, reference.dtype)
    return ExportedTensor(name=name, source=reference.name, dtype=dtype, shape=reference.shape)


def _columns(reference: TensorReference, name: str, start: int, stop: int) -> ExportedTensor:
    dtype: torch.dtype = getattr(torch, reference.dtype)
    shape = (reference.shape[0], stop - start)
    return ExportedTensor(name=name, source=reference.name, dtype=dtype, shape=shape, columns=slice(start, stop))


def export_checkpoint(folder: str, target: str, choice: ExportChoice, *, most_bytes: int) -> ExportResult:
    """Write tensors of a checkpoint into safetensors files.

    Args:
        folder: The checkpoint.
        target: The file to write, `….safetensors`. It must not exist.
        choice: What to export.
        most_bytes: The most bytes of tensors in one file; see Note [several files].

    Raises:
        CheckpointError: The folder is no checkpoint or is damaged, a file exists, or the disk is full. No file is left.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> rankless.save("trained", model=model)
        >>> choice = ExportChoice(state_counts={})
        >>> export_checkpoint("trained", "model.safetensors", choice, most_bytes=10**9).tensors
        2
    """
    source = _find_source(folder)
    file = Path(os.path.realpath(target))
    _check_target(source, file, target)
    manifest = read_manifest(source)
    content = list_exported(manifest, choice)
    parts = _divide(content.tensors, most_bytes)
    names = _name_files(file, len(parts))
    index = [file.with_name(f"{file.name}.index.json")] if len(parts) > 1 else []
    size = sum(_bytes_of(tensor) for tensor in content.tensors)
    _check_space([*names, *index], size)
    with StoredTensors(source, manifest, content.references) as stored, _partial_files() as partial:
        stored.open()
        for name, tensors in zip(names, parts, strict=True):
            _write_file(partial.add(name), tensors, stored)
        if index:
            weight_map = {each.name: name.name for name, part in zip(names, parts, strict=True) for each in part}
            encoded = msgspec.json.encode({"metadata": {"total_size": size}, "weight_map": weight_map})
            written = partial.add(index[0])
            written.write_bytes(msgspec.json.format(encoded, indent=2) + b"\n")
            sync(written)
        partial.commit()
    return ExportResult([*names, *index], len(content.tensors), size, content.left_out)


def _find_source(folder: str) -> Path:
    directory = Path(os.path.realpath(folder))
    saved = CheckpointDirectory(directory).entries() if directory.is_dir() else []
    if saved:
        raise CheckpointError(
            expected="one checkpoint",
            found=f"a series of {len(saved)} in {folder}",
            fix=f"export one of them, such as the latest: {os.path.join(folder, saved[-1].path.name)}",
        )
    return find_checkpoint(folder)


def _check_target(source: Path, file: Path, target: str) -> None:
    """Raise CheckpointError unless a file of that name may be made."""
    if not file.name.endswith(SUFFIX) or file.name == SUFFIX:
        raise CheckpointError(expected=f"--to FILE{SUFFIX}", found=target, fix=f"end the file's name in {SUFFIX}")
    if not file.parent.is_dir():
        raise CheckpointError(
            expected="--to FILE in a folder that exists", found=str(file.parent), fix="create the folder first"
        )
    if source in (file.parent, *file.parent.parents):
        raise CheckpointError(
            expected="--to FILE outside of the checkpoint, which has no other files",
            found=target,
            fix="write the file elsewhere",
        )


def _check_space(files: Sequence[Path], size: int) -> None:
    """Raise CheckpointError if a file exists, or the disk has less room than is needed."""
    existing = [file for file in files if file.exists() or file.is_symlink()]
    if existing:
        raise CheckpointError(
            expected="--to FILE that does not exist", found=str(existing[0]), fix="remove it, or choose another name"
        )
    free = shutil.disk_usage(files[0].parent).free
    if size > free:
        raise CheckpointError(
            expected=f"{size:,} free bytes in {files[0].parent}",
            found=f"{free:,}",
            fix="free space there, or export to another disk",
        )


def _divide(tensors: Sequence[ExportedTensor], most_bytes: int) -> list[list[ExportedTensor]]:
    """Return the tensors of each file, in their order."""
    parts: list[list[ExportedTensor]] = []
    used = 0
    for tensor in tensors:
        size = _bytes_of(tensor)
        if not parts or used + size > most_bytes:
            parts.append([])
            used = 0
        parts[-1].append(tensor)
        used += size
    return parts


def _name_files(file: Path, count: int) -> list[Path]:
    if count == 1:
        return [file]
    stem = file.name.removesuffix(SUFFIX)
    return [file.with_name(f"{stem}-{number:05}-of-{count:05}{SUFFIX}") for number in range(1, count + 1)]


def _bytes_of(tensor: ExportedTensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _write_file(file: Path, tensors: Sequence[ExportedTensor], stored: StoredTensors) -> None:
    """Write a file in parts of tensors."""
    writer = TensorFileWriter(file, {tensor.name: tensor.empty for tensor in tensors}, {})
    try:
        for tensor in tensors:
            source = stored.find(tensor.source)
            if not tensor.shape or 0 in tensor.shape:
                writer.write(tensor.name, tensor.select(source.read()))
                continue
            row_bytes = math.prod(source.shape[1:]) * source.dtype.itemsize
            count = max(1, PART_BYTES // max(1, row_bytes))
            for start in range(0, tensor.shape[0], count):
                rows = source.read_rows(0, start, min(count, tensor.shape[0] - start))
                writer.write(tensor.name, tensor.select(rows), first_row=start)
        writer.finish()
    finally:
        writer.close()


class _PartialFiles:
    """Files under other names until all are complete."""

    def __init__(self) -> None:
        self._targets: dict[Path, Path] = {}

    def add(self, target: Path) -> Path:
        """Return the path to write to for a file."""
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        self._targets[partial] = target
        return partial

    def commit(self) -> None:
        """Give the files their names, the index last."""
        for partial, target in self._targets.items():
            partial.rename(target)
        for folder in {target.parent for target in self._targets.values()}:
            sync(folder)

    def remove(self) -> None:
        """Remove what has no name yet."""
        for partial in self._targets:
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def _partial_files() -> Iterator[_PartialFiles]:
    partial = _PartialFiles()
    try:
        yield partial
    except OSError as error:
        raise CheckpointError(
            expected="to write an export",
            found=f"{type(error).__name__}: {error}",
            fix="free space there, or export to another disk; no file was left",
        ) from error
    finally:
        partial.remove()

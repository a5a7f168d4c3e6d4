"""`load`: every rank reads what it needs of the files, and either all objects are restored or none."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rankless.checkpoint.collective_errors import Agreement
from rankless.checkpoint.content import restore_random_state, select_rank_state
from rankless.checkpoint.file_io import read_manifest
from rankless.checkpoint.folder import find_checkpoint
from rankless.checkpoint.load_mismatches import Differences, compare_module, compare_optimizer, select_fitting
from rankless.checkpoint.manifest import Manifest, Node, SparseReference, TensorReference
from rankless.checkpoint.manifest import Mapping as MappingNode
from rankless.checkpoint.manifest import Sequence as SequenceNode
from rankless.checkpoint.state_tree import DetachedWithoutGather, decode
from rankless.checkpoint.stored_tensors import StoredTensors
from rankless.deferred_models.building import materialize
from rankless.errors import CheckpointError
from rankless.ownership.state_owner import StateOwner, WholeOwner
from rankless.ownership.unread_tensor import UnreadTensor
from rankless.parallel.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What a checkpoint holds besides the objects, and what did not fit them."""

    extra: Any
    left_out: str
    """Empty if everything fitted."""


def load(
    path: str | os.PathLike[str],
    objects: Mapping[str, Any],
    *,
    mesh: Mesh,
    owner: StateOwner | None = None,
    strict: bool = True,
    random: bool = True,
) -> Loaded:
    """Restore objects from the checkpoint at `path`, and the random number generators unless `random` is False.

    Every object takes the state of its name through its own `load_state_dict`. A checkpoint may hold more objects. If
    not `strict`, a module keeps its tensors for which the checkpoint has none of that name and shape, an object that
    was not saved stays as it is, and dtypes are converted. Every rank calls it and reads what it needs of the files;
    the number of ranks, and how states are divided, may differ from that of the save. Raises `CheckpointError` on every
    rank. It restores nothing unless all files are intact and all states fit. `owner` holds the states of jobs.
    """
    owner = owner or WholeOwner()
    fix = "give every rank the same files, in a shared folder or a copy on each host"
    with contextlib.ExitStack() as files:
        with Agreement(mesh=mesh, doing=f"read {os.fspath(path)}", fix=fix) as agreement:
            owner.begin_call()  # frees whole values that the script has read
            materialize(item for item in objects.values() if isinstance(item, nn.Module))
            folder = find_checkpoint(path)
            manifest = read_manifest(folder)
            held = _select_saved(objects, manifest, strict=strict)
            generators = select_rank_state(manifest.random, mesh.rank)
            nodes = [*(manifest.objects[name] for name in held), manifest.extra, *([generators] if random else [])]
            references = [reference for node in nodes for reference in _list_references(node)]
            tensors = files.enter_context(StoredTensors(folder, manifest, references))
            tensors.open()
            differences = _compare_all(held, manifest, tensors, strict=strict)
            agreement.summary = f"a checkpoint with checksum {manifest.sha256}"
        owner.begin_write()
        with Agreement(mesh=mesh, doing=f"restore {os.fspath(path)}"):
            for name, subject in held.items():
                _restore(name, subject, manifest.objects[name], tensors, strict=strict)
                _keep_values(subject, tensors, owner)
            extra = decode(manifest.extra, tensors.get)
            random_state = decode(generators, tensors.get) if random else None
            tensors.settle()
            if random:
                restore_random_state(random_state, mesh.device)
    unsaved = [f"nothing was saved as {name}" for name in objects if name not in held]
    left_out = [*unsaved, *(difference.describe() for difference in differences.values() if difference)]
    return Loaded(extra=extra, left_out="\n".join(left_out))


def _compare_all(
    held: Mapping[str, Any], manifest: Manifest, tensors: StoredTensors, *, strict: bool
) -> dict[str, Differences]:
    """Return what does not fit the objects. Raises `CheckpointError` for what must."""
    with DetachedWithoutGather():
        differences = {
            name: _compare(name, subject, decode(manifest.objects[name], tensors.get)) for name, subject in held.items()
        }
    # An optimizer cannot be restored in part, because its state belongs to all parameters or to none.
    _refuse({name: found for name, found in differences.items() if strict or not isinstance(held[name], nn.Module)})
    return differences


def _keep_values(subject: Any, tensors: StoredTensors, owner: StateOwner) -> None:
    """Read what an object has kept of the state that it was given: this worker's pieces, or whole tensors."""
    if isinstance(subject, torch.optim.Optimizer):
        for parameter, entries in subject.state.items():
            for key, value in entries.items() if isinstance(entries, dict) else ():
                if isinstance(value, UnreadTensor):
                    entries[key] = owner.take_state(parameter, key, value)
    tensors.settle()


def _select_saved(objects: Mapping[str, Any], manifest: Manifest, *, strict: bool) -> dict[str, Any]:
    """Return the objects for which the checkpoint has a state."""
    for name, subject in objects.items():
        if not callable(getattr(subject, "load_state_dict", None)):
            raise CheckpointError(
                expected=f"{name} to have load_state_dict()",
                found=f"a {type(subject).__name__} without it",
                fix="pass an object that has it",
            )
        if strict and name not in manifest.objects:
            raise CheckpointError(
                expected=f"an object that the checkpoint holds: {', '.join(manifest.objects) or 'none'}",
                found=name,
                fix="load it under its name in the save, or with strict=False to leave it as it is",
            )
    return {name: subject for name, subject in objects.items() if name in manifest.objects}


def _list_references(node: Node) -> Iterator[TensorReference]:
    match node:
        case TensorReference():
            yield node
        case SparseReference():
            yield from (node.indices, node.values)
        case SequenceNode():
            for item in node.items:
                yield from _list_references(item)
        case MappingNode():
            for _, item in node.items:
                yield from _list_references(item)
            yield from _list_references(node.metadata)


def _compare(name: str, subject: Any, state: Any) -> Differences:
    if isinstance(subject, nn.Module) and isinstance(state, Mapping):
        return compare_module(name, subject, state)
    if isinstance(subject, torch.optim.Optimizer) and isinstance(state, Mapping):
        return compare_optimizer(name, subject, state)
    return Differences()


def _refuse(differences: Mapping[str, Differences]) -> None:
    if any(differences.values()):
        raise CheckpointError(
            expected=f"the states saved as {', '.join(name for name in differences if differences[name])} to fit",
            found="\n" + "\n".join(difference.describe() for difference in differences.values() if difference),
            fix="build the objects as they were saved, or pass strict=False: modules then take what fits",
        )


def _restore(name: str, subject: Any, node: Node, tensors: StoredTensors, *, strict: bool) -> None:
    state = decode(node, tensors.get)
    try:
        if not strict and isinstance(subject, nn.Module) and isinstance(state, Mapping):
            with DetachedWithoutGather():
                state = select_fitting(subject, state)
            subject.load_state_dict(state, strict=False)
        else:
            subject.load_state_dict(state)
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        tensors.settle()
        raise CheckpointError(
            expected=f"the state saved as {name} to fit the {type(subject).__name__} it is loaded into",
            found=f"{type(error).__name__}: {str(error).strip()}",
            fix="build the object as it was when it was saved",
        ) from error

"""`load`: every rank reads the files, and either all objects are restored or none."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rankless.checkpoint.collective_errors import Agreement
from rankless.checkpoint.differences import Differences, compare_module, compare_optimizer, select_fitting
from rankless.checkpoint.file_io import read_manifest, read_tensors
from rankless.checkpoint.folder import find_checkpoint
from rankless.checkpoint.manifest import Manifest, Node, TensorReference
from rankless.checkpoint.manifest import Mapping as MappingNode
from rankless.checkpoint.manifest import Sequence as SequenceNode
from rankless.checkpoint.random_state import restore_random_state, select_rank_state
from rankless.checkpoint.state_tree import decode
from rankless.deferred_models.building import materialize
from rankless.errors import CheckpointError
from rankless.parallel.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What a checkpoint holds besides the objects, and what did not fit them."""

    extra: Any
    left_out: str
    """Empty if everything fitted."""


def load(
    path: str | os.PathLike[str], objects: Mapping[str, Any], *, mesh: Mesh, strict: bool = True, random: bool = True
) -> Loaded:
    """Restore objects from the checkpoint at `path`, and the random number generators unless `random` is False.

    Every object takes the state of its name through its own `load_state_dict`. A checkpoint may hold more objects. If
    not `strict`, a module keeps its tensors for which the checkpoint has none of that name and shape, an object that
    was not saved stays as it is, and dtypes are converted. Every rank calls it and reads the files; the number of ranks
    may differ from that of the save. Raises `CheckpointError` on every rank. It restores nothing unless all files are
    intact and all states fit.
    """
    fix = "give every rank the same files, in a shared folder or a copy on each host"
    with Agreement(mesh=mesh, doing=f"read {os.fspath(path)}", fix=fix) as agreement:
        materialize(item for item in objects.values() if isinstance(item, nn.Module))
        folder = find_checkpoint(path)
        manifest = read_manifest(folder)
        held = _select_saved(objects, manifest, strict=strict)
        nodes: list[Node] = [manifest.objects[name] for name in held]
        generators = select_rank_state(manifest.random, mesh.rank)
        nodes += [manifest.extra, *([generators] if random else [])]
        tensors = read_tensors(folder, manifest.files, {name for node in nodes for name in _references(node)})
        states = {name: decode(manifest.objects[name], tensors) for name in held}
        extra = decode(manifest.extra, tensors)
        random_state = decode(generators, tensors) if random else None
        differences = {name: _compare(name, subject, states[name]) for name, subject in held.items()}
        # An optimizer cannot be restored in part, because its state belongs to all parameters or to none.
        _refuse({name: found for name, found in differences.items() if strict or not isinstance(held[name], nn.Module)})
        agreement.summary = f"a checkpoint with checksum {manifest.sha256}"
    with Agreement(mesh=mesh, doing=f"restore {os.fspath(path)}"):
        for name, subject in held.items():
            _restore(name, subject, states[name], strict=strict)
        if random:
            restore_random_state(random_state, mesh.device)
    unsaved = [f"nothing was saved as {name}" for name in objects if name not in held]
    left_out = [*unsaved, *(difference.describe() for difference in differences.values() if difference)]
    return Loaded(extra=extra, left_out="\n".join(left_out))


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


def _references(node: Node) -> Iterator[str]:
    match node:
        case TensorReference():
            yield node.name
        case SequenceNode():
            for item in node.items:
                yield from _references(item)
        case MappingNode():
            for _, item in node.items:
                yield from _references(item)
            yield from _references(node.metadata)


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


def _restore(name: str, subject: Any, state: Any, *, strict: bool) -> None:
    try:
        if not strict and isinstance(subject, nn.Module) and isinstance(state, Mapping):
            subject.load_state_dict(select_fitting(subject, state), strict=False)
        else:
            subject.load_state_dict(state)
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            expected=f"the state saved as {name} to fit the {type(subject).__name__} it is loaded into",
            found=f"{type(error).__name__}: {str(error).strip()}",
            fix="build the object as it was when it was saved",
        ) from error

"""`load`: every rank reads what it needs of the files, and either all objects are restored or none."""

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from rankless.checkpoint.content import restore_random_state, select_rank_state
from rankless.checkpoint.folder_commit import find_checkpoint
from rankless.checkpoint.lazy_tensor_reading import StoredTensors
from rankless.checkpoint.manifest import Manifest, Node, TensorReference, iterate_nodes
from rankless.checkpoint.manifest_io import read_manifest
from rankless.checkpoint.raise_on_all_ranks import Agreement
from rankless.checkpoint.state_tree import DetachedWithoutGather, decode
from rankless.deferred_models.build_and_materialize import materialize
from rankless.errors import CheckpointError
from rankless.ownership.state_owner import StateOwner
from rankless.ownership.unread_tensor import UnreadTensor
from rankless.parallel.mesh import Mesh

MAX_LINES_PER_KIND = 6
SHAPED_LIKE_THE_PARAMETER = frozenset(
    (
        *("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "grad_avg"),
        *("acc_delta", "sum", "prev", "step_size"),
    )
)
"""The state that PyTorch's optimizers keep for each element of a parameter."""


@dataclass(frozen=True, kw_only=True)
class Differences:
    """Tensors of one object that do not fit, by name. It is false if the state fits."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shape_mismatches: list[str] = field(default_factory=list)
    dtype_mismatches: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.shape_mismatches or self.dtype_mismatches)

    def describe(self) -> str:
        """Return one line for each kind of difference and group of names."""
        kinds = {
            "not in the checkpoint": self.missing,
            "only in the checkpoint": self.unexpected,
            "of another shape": self.shape_mismatches,
            "of another dtype": self.dtype_mismatches,
        }
        return "\n".join(
            line
            for kind, names in kinds.items()
            if names
            for line in (f"{kind}:", *(f"  {text}" for text in shorten_names(names)))
        )


def compare_module(name: str, module: nn.Module, saved: Mapping[str, Any]) -> Differences:
    """Return which tensors of a saved state do not fit the module as it is now."""
    here = module.state_dict()
    missing = [f"{name}.{key}" for key in here if key not in saved]
    unexpected = [f"{name}.{key}" for key in saved if key not in here]
    shape_mismatches, dtype_mismatches = [], []
    for key, ours in here.items():
        theirs = saved.get(key)
        if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor):
            continue
        if ours.shape != theirs.shape and not _is_lazy(ours):
            shape_mismatches.append(f"{name}.{key}: {tuple(theirs.shape)} saved, {tuple(ours.shape)} here")
        elif not _is_lossless(theirs.dtype, ours.dtype):
            dtype_mismatches.append(f"{name}.{key}: {_dtype_name(theirs.dtype)} saved, {_dtype_name(ours.dtype)} here")
    return Differences(
        missing=missing, unexpected=unexpected, shape_mismatches=shape_mismatches, dtype_mismatches=dtype_mismatches
    )


def select_fitting(module: nn.Module, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a saved state that the module can take."""
    here = module.state_dict()
    return {
        key: value
        for key, value in saved.items()
        if key in here and (not isinstance(value, Tensor) or value.shape == here[key].shape or _is_lazy(here[key]))
    }


def compare_optimizer(name: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> Differences:
    """Return which state of an optimizer does not have the shape of its parameter.

    PyTorch does not check it: the step would fail later, or would broadcast and be wrong.
    """
    groups = saved.get("param_groups")
    if not isinstance(groups, list) or len(groups) != len(optimizer.param_groups):
        found = len(groups) if isinstance(groups, list) else 0
        return Differences(shape_mismatches=[f"{name}: {found} groups saved, {len(optimizer.param_groups)} here"])
    shape_mismatches = []
    for number, (theirs, ours) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        keys, parameters = list(theirs["params"]), ours["params"]
        if len(keys) != len(parameters):
            shape_mismatches.append(f"{name}: {len(keys)} parameters saved in group {number}, {len(parameters)} here")
            continue
        for key, parameter in zip(keys, parameters, strict=True):
            for kind, value in saved.get("state", {}).get(key, {}).items():
                if kind in SHAPED_LIKE_THE_PARAMETER and isinstance(value, Tensor) and value.shape != parameter.shape:
                    shapes = f"{tuple(value.shape)} saved, {tuple(parameter.shape)} here"
                    shape_mismatches.append(f"{name}.state.{key}.{kind}: {shapes}")
    return Differences(shape_mismatches=shape_mismatches)


def shorten_names(names: Iterable[str]) -> list[str]:
    """Return a few lines of names, with one line for all names that differ only in numbers."""
    groups: dict[str, list[str]] = {}
    for name in names:
        head, colon, tail = name.partition(":")
        groups.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", head) + colon + tail, []).append(name)
    lines = [
        members[0] if len(members) == 1 else f"{pattern} ({len(members)} of them)"
        for pattern, members in groups.items()
    ]
    left = sum(len(members) for members in list(groups.values())[MAX_LINES_PER_KIND:])
    return lines[:MAX_LINES_PER_KIND] + ([f"and {left} more"] if left else [])


def _is_lazy(tensor: Tensor) -> bool:
    return isinstance(tensor, (UninitializedParameter, UninitializedBuffer))


def _is_lossless(saved: torch.dtype, here: torch.dtype) -> bool:
    kinds = {(dtype.is_floating_point, dtype.is_complex, dtype == torch.bool) for dtype in (saved, here)}
    return saved == here or (len(kinds) == 1 and torch.promote_types(saved, here) == here)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
    owner = owner or StateOwner()
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
            found = [each for node in nodes for each in iterate_nodes(node)]
            references = [each for each in found if isinstance(each, TensorReference)]
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

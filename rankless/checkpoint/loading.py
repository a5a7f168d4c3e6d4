"""`load`: every rank reads the files."""

import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rankless.checkpoint.agreement import Agreement
from rankless.checkpoint.folder import find_checkpoint, read_manifest, read_tensors
from rankless.checkpoint.manifest import RANDOM_STATE, Manifest
from rankless.checkpoint.random_state import restore_random_state
from rankless.checkpoint.tree import decode
from rankless.collectives.mesh import Mesh
from rankless.errors import CheckpointError


def load(path: str | os.PathLike[str], objects: Mapping[str, Any], *, mesh: Mesh, random: bool = True) -> None:
    """The objects restored from the checkpoint at `path`, and the random generators unless `random` is False.

    Every object gets the state saved under its name through its own `load_state_dict`; a checkpoint may
    hold more than is asked for. Called on every rank, each of which reads the files; they may be on one
    rank now and have been saved by many, or the reverse. Raises CheckpointError, on every rank; nothing is
    restored unless all files are whole and every name is there.
    """
    with Agreement(mesh=mesh, doing=f"read {os.fspath(path)}") as agreement:
        folder = find_checkpoint(path)
        manifest = read_manifest(folder)
        for name, subject in objects.items():
            _check(name, subject, manifest)
        mapped = read_tensors(folder, manifest.files)
        agreement.summary = f"a checkpoint with checksum {manifest.sha256}"
    with Agreement(mesh=mesh, doing=f"restore {os.fspath(path)}"):
        tensors = _Owned(mapped)
        for name, subject in objects.items():
            _restore(name, subject, decode(manifest.objects[name], tensors))
        if random:
            restore_random_state(decode(manifest.objects[RANDOM_STATE], tensors))


class _Owned(dict[str, Tensor]):
    """Tensors cloned out of the mapped file when first asked for, once each, so that tied ones stay tied."""

    def __init__(self, mapped: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._mapped = mapped

    def get(self, name: str, default: Any = None) -> Any:
        """The tensor of that name, or `default`."""
        if name not in self and name in self._mapped:
            self[name] = self._mapped[name].clone()
        return super().get(name, default)


def _check(name: str, subject: Any, manifest: Manifest) -> None:
    if not callable(getattr(subject, "load_state_dict", None)):
        raise CheckpointError(
            expected=f"{name} to have load_state_dict()",
            found=f"a {type(subject).__name__} without it",
            fix="pass an object that has it",
        )
    names = [known for known in manifest.objects if known != RANDOM_STATE]
    if name not in names:
        raise CheckpointError(
            expected=f"an object that the checkpoint holds: {', '.join(names) or 'none'}",
            found=name,
            fix="load it under the name that it was saved with",
        )


def _restore(name: str, subject: Any, state: Any) -> None:
    try:
        subject.load_state_dict(state)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            expected=f"the state saved as {name} to fit the {type(subject).__name__} it is loaded into",
            found=str(error).strip(),
            fix="build the object as it was when it was saved",
        ) from error

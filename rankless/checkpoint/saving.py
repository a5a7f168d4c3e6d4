"""`save`: rank 0 writes, all ranks wait until it is committed."""

import os
from collections.abc import Mapping
from typing import Any

from rankless.checkpoint.agreement import Agreement
from rankless.checkpoint.folder import write_checkpoint
from rankless.checkpoint.manifest import RANDOM_STATE, Node
from rankless.checkpoint.random_state import capture_random_state
from rankless.checkpoint.tree import TreeWriter
from rankless.collectives.mesh import Mesh
from rankless.errors import CheckpointError


def save(path: str | os.PathLike[str], objects: Mapping[str, Any], *, mesh: Mesh) -> None:
    """A checkpoint folder at `path`, complete on disk when this returns on any rank.

    `objects` are things with `state_dict()` by name: modules, optimizers, schedulers, your own. The state
    of the random generators goes with them. The old checkpoint at `path`, if any, is replaced in one piece:
    a kill at any point leaves the old or the new one. Called on every rank; rank 0's state is written.
    Raises CheckpointError, on every rank.
    """
    with Agreement(mesh=mesh, doing=f"save {os.fspath(path)}"):
        if mesh.rank == 0:
            writer = TreeWriter()
            nodes: dict[str, Node] = {}
            for name, subject in objects.items():
                nodes[name] = writer.encode(_state(name, subject), (name,))
            nodes[RANDOM_STATE] = writer.encode(capture_random_state(), (RANDOM_STATE,))
            write_checkpoint(path, nodes, writer.tensors)


def _state(name: str, subject: Any) -> object:
    if name == RANDOM_STATE or not name:
        raise CheckpointError(
            expected=f"a name that is not empty and not {RANDOM_STATE!r}, which the generators' state has",
            found=f"an object named {name!r}",
            fix="give it another name",
        )
    if not callable(getattr(subject, "state_dict", None)):
        raise CheckpointError(
            expected=f"{name} to have state_dict() and load_state_dict()",
            found=f"a {type(subject).__name__} without state_dict",
            fix="pass an object that has them; the random generators are saved without being named",
        )
    return subject.state_dict()

"""The world of a round: a process group of the workers that are left, and what is made of it."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch.distributed as dist

from rankless.collectives.desync_detection import DesyncDetector
from rankless.config.run_config import Backend
from rankless.context.world import World
from rankless.parallel.mesh import Mesh, MeshAxis
from rankless.runtime.elastic_round import Round
from rankless.runtime.hooks.torch_settings import find_original_destroy
from rankless.runtime.rendezvous.process_group import make_world_group
from rankless.runtime.world_mesh import make_world_mesh


def join_round_world(before: World, joined: Round, backend: Backend) -> tuple[World, Callable[[], None]]:
    """Leave the process group, join that of a round, and return a world with it. Collective.

    Args:
        before: The world so far.
        joined: The round.
        backend: The backend of the run's default process group.

    Returns:
        The world, and the function that destroys its group.
    """
    device, place = before.mesh.device, joined.assignment
    if isinstance(before.mesh.desync_detector, DesyncDetector):
        before.mesh.desync_detector.close()
    if dist.is_initialized():
        find_original_destroy()()
    end = make_world_group(
        backend, device, store=joined.store, rank=place.rank, world_size=place.size, must_be_abortable=True
    )
    mesh = make_world_mesh(device)
    detector = DesyncDetector(mesh, notify=before.notify) if mesh.size > 1 else None
    if detector is not None:
        detector.open()
    return replace(before, mesh=replace(mesh, desync_detector=detector)), end


def arrange_kinds(mesh: Mesh, members: Sequence[int], kinds: Sequence[Sequence[int]]) -> Mesh:
    """Return the mesh of a round with its workers along one axis `pipeline`, if some are heterogeneous.

    Args:
        mesh: The workers, along one axis `data`.
        members: The number of each, by rank.
        kinds: The numbers of the workers of each kind with which the run began; none if all are alike.
    """
    if not kinds:
        return mesh
    ranks = tuple(tuple(rank for rank, number in enumerate(members) if number in kind) for kind in kinds)
    axis = MeshAxis(
        name="pipeline", role="pipeline", rank=mesh.rank, size=mesh.size, group=mesh.group, stage_workers=ranks
    )
    return replace(mesh, axes=(axis,))

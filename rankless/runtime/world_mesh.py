"""Make the mesh of a process: its axes and their process groups."""

from collections.abc import Sequence
from typing import get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rankless.parallel.mesh import AxisRole, Mesh, MeshAxis
from rankless.records.parallel_plan import PlannedAxis


def make_world_mesh(device: torch.device, axes: Sequence[PlannedAxis] = ()) -> Mesh:
    """Return the mesh of all workers. Collective if it has several axes.

    PyTorch's `DeviceMesh` makes the process groups.

    Args:
        device: This worker's device.
        axes: The axes from the outermost. Those with one worker are left out. Default: one axis `data`.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return Mesh.solo(device)
    rank, size, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    divided = [axis for axis in axes if axis.size > 1]
    if not divided:
        return Mesh(rank=rank, size=size, device=device, group=world)
    if len(divided) == 1:
        (axis,) = divided
        made = MeshAxis(
            name=axis.name,
            role=read_role(axis),
            rank=rank,
            size=size,
            group=world,
            stage_workers=axis.stage_workers,
        )
        return Mesh(rank=rank, size=size, device=device, group=world, axes=(made,))
    names = tuple(axis.name for axis in divided)
    grid = init_device_mesh(device.type, tuple(axis.size for axis in divided), mesh_dim_names=names)
    made_axes = tuple(
        MeshAxis(
            name=axis.name,
            role=read_role(axis),
            rank=grid.get_local_rank(axis.name),
            size=axis.size,
            group=grid.get_group(axis.name),
        )
        for axis in divided
    )
    return Mesh(rank=rank, size=size, device=device, group=world, axes=made_axes)


def read_role(axis: PlannedAxis) -> AxisRole:
    """Return the role of a planned axis, which the plan has as text."""
    return next(role for role in get_args(AxisRole) if role == axis.role)

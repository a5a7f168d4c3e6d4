"""Meshes with any axes in the workers of `on_mesh`."""

import itertools
import math

import torch.distributed as dist

from rankless.parallel.mesh import Mesh, MeshAxis


def make_grid(mesh: Mesh, **sizes: int) -> Mesh:
    """Return the mesh with axes of these roles, from the outermost, whose sizes give the number of workers."""
    roles, counts = list(sizes), list(sizes.values())
    assert math.prod(counts) == mesh.size
    own = tuple(mesh.rank // math.prod(counts[place + 1 :]) % size for place, size in enumerate(counts))
    axes = []
    for place, (role, size) in enumerate(zip(roles, counts, strict=True)):
        group = None
        for others in itertools.product(*(range(count) for count in (*counts[:place], *counts[place + 1 :]))):
            members = []
            for along in range(size):
                ranks = (*others[:place], along, *others[place:])
                members.append(sum(rank * math.prod(counts[at + 1 :]) for at, rank in enumerate(ranks)))
            made = dist.new_group(members)
            if mesh.rank in members:
                group = made
        axes.append(MeshAxis(name=role, role=role, rank=own[place], size=size, group=group))
    return Mesh(rank=mesh.rank, size=mesh.size, device=mesh.device, group=mesh.group, axes=tuple(axes))

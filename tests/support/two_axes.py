"""Meshes with two axes in the four workers of `on_mesh`."""

import torch.distributed as dist

from rankless.parallel.mesh import AxisRole, Mesh, MeshAxis


def make_two_axes(mesh: Mesh, inner: AxisRole = "tensor") -> Mesh:
    """Return the mesh of four workers as data=2 and an inner axis of two, `tensor` by default."""
    data, tensor = divmod(mesh.rank, 2)
    columns = [dist.new_group([place, place + 2]) for place in range(2)]
    rows = [dist.new_group([2 * place, 2 * place + 1]) for place in range(2)]
    axes = (
        MeshAxis(name="data", role="data", rank=data, size=2, group=columns[tensor]),
        MeshAxis(name="inner", role=inner, rank=tensor, size=2, group=rows[data]),
    )
    return Mesh(rank=mesh.rank, size=4, device=mesh.device, group=mesh.group, axes=axes)

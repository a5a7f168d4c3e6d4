"""Divided tensors made by hand, without a job: quick to make, in any division."""

import json

import torch
from safetensors import safe_open

from rankless.checkpoint import Saver, load
from rankless.ownership.partitioned_tensor import Partition, WholeValues, divide_parameter, make_partitioned_tensor
from rankless.ownership.shard_layout import ShardLayout
from rankless.ownership.sharded_state_owner import ShardedStateOwner
from rankless.parallel.tensor_placement import Shard


def lengths_of(size, ranks, kind="even"):
    """Return the rows of each rank: about as many each, all on the last, or most on the first."""
    if kind == "last":
        return tuple(size if rank == ranks - 1 else 0 for rank in range(ranks))
    if kind == "uneven":
        return (size - min(size, ranks - 1), *(int(rank < min(size, ranks - 1)) for rank in range(ranks - 1)))
    return tuple((size + ranks - 1 - rank) // ranks for rank in range(ranks))


def make_partition(mesh, whole, dim=0, kind="even", name="tensor"):
    """Return this rank's part of a tensor that all ranks have made."""
    layout = ShardLayout.of(whole, Shard(dim, lengths_of(whole.shape[dim], mesh.size, kind)))
    values = WholeValues(mesh.axes[0], lambda _operation: None)
    return Partition(layout, layout.copy_shard(whole, mesh.rank), name, values, device=whole.device)


def divide(mesh, whole, dim=0, kind="even"):
    """Return a divided tensor."""
    return make_partitioned_tensor(make_partition(mesh, whole, dim, kind))


def divide_model(mesh, model, kind="even"):
    """Divide all parameters of a model that have rows."""
    for name, parameter in model.named_parameters():
        if parameter.dim() and parameter.numel():
            divide_parameter(parameter, make_partition(mesh, parameter.detach(), parameter.dim() - 1, kind, name))
    return model


def make_saver(mesh):
    """Return a saver of a mesh with divided states."""
    return Saver(mesh=mesh, owner=ShardedStateOwner(mesh.axes[0], lambda _operation: None))


def load_into(mesh, path, objects, **options):
    """Load as a run with divided states does."""
    return load(path, objects, mesh=mesh, owner=make_saver(mesh).owner, **options)


def read_file(path):
    """Return the tensors of a file, as another program reads them that knows the dtypes in its metadata."""
    with safe_open(path, "pt") as file:
        parts = json.loads(file.metadata().get("complex128", "[]"))
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    return {name: torch.view_as_complex(value) if name in parts else value for name, value in found.items()}


def make_tensors():
    """Return tensors of several shapes, dtypes and strides."""
    generator = torch.Generator().manual_seed(5)
    return {
        "matrix": torch.randn(7, 5, generator=generator),
        "turned": torch.randn(5, 8, generator=generator).t(),
        "image": torch.randn(4, 3, 6, 5, generator=generator).to(memory_format=torch.channels_last),
        "half": torch.randn(9, 4, generator=generator).bfloat16(),
        "double": torch.randn(6, generator=generator, dtype=torch.float64),
        "complex128": torch.randn(7, 2, generator=generator, dtype=torch.complex128).conj(),
        "complex": torch.randn(5, 3, generator=generator, dtype=torch.complex64),
        "numbers": torch.arange(40).view(8, 5),
        "flags": torch.arange(6) > 2,
        "bytes": torch.arange(200000, dtype=torch.int32).to(torch.uint8).view(-1, 2),
        "none": torch.empty(4, 0),
    }

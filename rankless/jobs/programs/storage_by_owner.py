"""Tell the compiler how the states of a job's program are stored."""

from collections.abc import Mapping

from torch import Tensor

from rankless.compiler.ir.logical_program import LogicalProgram
from rankless.compiler.scheduling.state_storage import GradientMemory, StateStorage
from rankless.context.world import World
from rankless.jobs.definition import JobDefinition
from rankless.jobs.programs.bound_program import find_slot
from rankless.parallel.mesh import Mesh, MeshAxis, find_axis, list_layer_axes
from rankless.parallel.tensor_placement import BlockedShard, Replicate, Shard, Sharding, read_stored

Placements = Mapping[str, Shard | BlockedShard]
"""How a state is divided, by axis."""


def find_storage(job: JobDefinition, program: LogicalProgram, world: World, memory: GradientMemory) -> StateStorage:
    """Return how the states of a program are stored.

    Args:
        job: The job.
        program: A program of it.
        world: Has the owner of the states.
        memory: The memory of the job's gradients.
    """
    owner, mesh = world.owner, world.mesh
    values: dict[str, Placements] = {}
    shared: dict[str, int] = {}
    gradients: dict[str, Placements] = {}
    for described in program.inputs.values():
        if described.kind in ("parameter", "buffer") and described.constant is None:
            tensor = read_slot(job, described.name)
            values[described.name] = owner.find_value_placements(tensor)
            number = owner.find_shared_memory(tensor)
            if number is not None:
                shared[described.name] = number
    for _, output in program.outputs:
        if output.kind == "gradient":
            gradients[output.name] = owner.find_gradient_placements(read_slot(job, output.name))
    data, pipeline = find_axis(mesh, "data"), find_axis(mesh, "pipeline")
    # A tied parameter may be an input under one name and have its gradient under another.
    both = values | gradients
    return StateStorage(
        axis=data,
        values=select_shards(values, data),
        shared=shared,
        gradients=select_shards(gradients, data),
        shardings=make_shardings(both, mesh),
        ranks=tuple(axis.rank for axis in mesh.axes),
        owned=select_shards(both, pipeline),
        copies={name: owner.find_copies(read_slot(job, name)) for name in select_shards(both, pipeline)},
        memory=memory,
    )


def select_shards(placements: Mapping[str, Placements], axis: MeshAxis | None) -> dict[str, Shard]:
    """Return how an axis divides states, by name."""
    found = {name: None if axis is None else known.get(axis.name) for name, known in placements.items()}
    return {name: placement for name, placement in found.items() if isinstance(placement, Shard)}


def make_shardings(placements: Mapping[str, Placements], mesh: Mesh) -> dict[str, Sharding]:
    """Return the shardings of the states that programs take in pieces, by name."""
    names = {axis.name for axis in list_layer_axes(mesh)}
    return {
        name: tuple(
            read_stored(known[axis.name]) if axis.name in names & set(known) else Replicate() for axis in mesh.axes
        )
        for name, known in placements.items()
        if names & set(known)
    }


def read_slot(job: JobDefinition, name: str) -> Tensor:
    """Return the parameter or buffer with a name such as "model.layer.weight"."""
    slot = find_slot(job, name)
    tensor = slot.table[slot.key]
    assert tensor is not None, f"{name} no longer exists"
    return tensor

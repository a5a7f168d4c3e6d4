"""Tell the compiler how the states of a job's program are stored."""

from torch import Tensor

from rankless.compiler.ir.logical_program import LogicalProgram
from rankless.compiler.scheduling.gradient_memory import GradientMemory
from rankless.compiler.scheduling.stored_states import StateStorage
from rankless.compiler.sharding.redistribution_steps import replace_placement
from rankless.context.world import World
from rankless.jobs.definition import JobDefinition
from rankless.jobs.programs.bound_program import find_slot
from rankless.parallel.mesh import find_axis, find_state_axis
from rankless.parallel.tensor_placement import BlockedShard, Replicate, Shard, Sharding


def find_storage(job: JobDefinition, program: LogicalProgram, world: World, memory: GradientMemory) -> StateStorage:
    """Return how the states of a program are stored.

    Args:
        job: The job.
        program: A program of it.
        world: Has the owner of the states.
        memory: The memory of the job's gradients.
    """
    owner, mesh = world.owner, world.mesh
    divided_along = find_state_axis(mesh)
    values: dict[str, Shard | BlockedShard] = {}
    shared: dict[str, int] = {}
    gradients: dict[str, Shard | BlockedShard] = {}
    for described in program.inputs.values():
        if described.kind in ("parameter", "buffer") and described.constant is None:
            tensor = read_slot(job, described.name)
            placement, number = owner.find_value_placement(tensor), owner.find_shared_memory(tensor)
            if placement is not None:
                values[described.name] = placement
            if number is not None:
                shared[described.name] = number
    for _, output in program.outputs:
        if output.kind == "gradient":
            placement = owner.find_gradient_placement(read_slot(job, output.name))
            if placement is not None:
                gradients[output.name] = placement
    if divided_along is not None and divided_along.role == "tensor":
        number = mesh.axes.index(divided_along)
        whole: Sharding = (Replicate(),) * len(mesh.axes)
        # A tied parameter may be an input under one name and have its gradient under another.
        shardings = {
            name: replace_placement(whole, number, placement) for name, placement in (values | gradients).items()
        }
        return StateStorage(shardings=shardings, ranks=tuple(axis.rank for axis in mesh.axes), memory=memory)
    return StateStorage(
        axis=find_axis(mesh, "data"),
        values={name: item for name, item in values.items() if isinstance(item, Shard)},
        shared=shared,
        gradients={name: item for name, item in gradients.items() if isinstance(item, Shard)},
        memory=memory,
    )


def read_slot(job: JobDefinition, name: str) -> Tensor:
    """Return the parameter or buffer with a name such as "model.layer.weight"."""
    slot = find_slot(job, name)
    tensor = slot.table[slot.key]
    assert tensor is not None, f"{name} no longer exists"
    return tensor

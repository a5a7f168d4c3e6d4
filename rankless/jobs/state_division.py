"""Divide the states of a job between workers as its plan says, and tell the compiler how they are stored."""

from typing import Any

from torch import Tensor

from rankless.compiler.capture.graph_cleanup import named_tensors
from rankless.compiler.ir.logical_program import LogicalProgram
from rankless.compiler.scheduling.stored_states import StateStorage
from rankless.context.world import World
from rankless.jobs.bound_program import find_slot
from rankless.jobs.definition import JobDefinition
from rankless.jobs.optimizer_step import count_group_parameters
from rankless.ownership.default_policy import make_default_plan
from rankless.ownership.divided_owner import DividedOwner
from rankless.parallel.tensor_placement import Shard


class StateDivision:
    """Divides the parameters of one job at its first call, and those that optimizers get later."""

    def __init__(self, job: JobDefinition, world: World) -> None:
        self._job = job
        self._world = world
        self._known: list[Any] | None = None

    def update(self) -> bool:
        """Divide parameters that are not divided yet. Return whether there were any. Collective if there are."""
        job, owner = self._job, self._world.owner
        if job.step_options.zero is None or not isinstance(owner, DividedOwner):
            return False
        counts = count_group_parameters(job)
        if counts == self._known:
            return False
        self._known = counts
        tensors = named_tensors(job.modules)
        plan = make_default_plan(tensors, job.optimized_parameters(), self._world.mesh, job.step_options.zero)
        before = owner.version
        owner.divide(plan, tensors, line=job.line)
        owner.begin_call()  # frees the memory of whole parameters
        return owner.version != before


def find_storage(job: JobDefinition, program: LogicalProgram, world: World) -> StateStorage:
    """Return how the states of a program are stored.

    Args:
        job: The job.
        program: A program of it.
        world: Has the owner of the states.
    """
    owner = world.owner
    values: dict[str, Shard] = {}
    gradients: dict[str, Shard] = {}
    for described in program.inputs.values():
        if described.kind in ("parameter", "buffer") and described.constant is None:
            placement = owner.find_value_placement(read_slot(job, described.name))
            if placement is not None:
                values[described.name] = placement
    for _, output in program.outputs:
        if output.kind == "gradient":
            placement = owner.find_gradient_placement(read_slot(job, output.name))
            if placement is not None:
                gradients[output.name] = placement
    axis = next((axis for axis in world.mesh.axes if axis.role == "data"), None)
    return StateStorage(axis=axis, values=values, gradients=gradients)


def read_slot(job: JobDefinition, name: str) -> Tensor:
    """Return the parameter or buffer with a name such as "model.layer.weight"."""
    slot = find_slot(job, name)
    tensor = slot.table[slot.key]
    assert tensor is not None, f"{name} no longer exists"
    return tensor

"""The plan that a job has if nobody gives another one: data parallelism, with the states divided that `zero=` names."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from rankless.ownership.optimizer_pieces import READS_WHOLE, list_parameters
from rankless.ownership.piece_layout import divide_evenly, is_dense, order_dims
from rankless.parallel.mesh import Mesh, MeshAxis
from rankless.records.parallel_plan import JobPlan, StateDivision, StatePlan, ZeroLevel


def make_default_plan(
    tensors: Mapping[str, Tensor],
    optimizers: Sequence[Optimizer],
    mesh: Mesh,
    zero: ZeroLevel | None,
    offload: bool = False,
    divisions: Mapping[str, StateDivision | None] | None = None,
) -> JobPlan:
    """Return the data-parallel plan of a job.

    Args:
        tensors: The job's parameters and buffers by name.
        optimizers: Its optimizers. A parameter of one that reads whole tensors belongs to one worker.
        mesh: The workers. The first axis with the role `data` divides states.
        zero: What is divided; None for nothing.
        offload: Whether the pieces lie in the memory of the host.
        divisions: How parameters are divided of which no worker needs the whole, by name: along the axis `pipeline` or
            `tensor`, if the mesh has one.
    """
    stepped = {id(item): optimizer for optimizer in optimizers for item in list_parameters(optimizer)}
    loads = [0] * mesh.size
    axis = next((axis for axis in mesh.axes if axis.role == "data"), None)
    states: dict[str, StatePlan] = {}
    known: set[int] = set()
    for name, tensor in tensors.items():
        if id(tensor) in known:
            continue
        known.add(id(tensor))
        division = None
        if axis is not None and zero is not None and isinstance(tensor, nn.Parameter) and id(tensor) in stepped:
            is_whole = type(stepped[id(tensor)]) in READS_WHOLE
            division = assign(tensor, axis, loads) if is_whole else divide(tensor, axis)
        if divisions is not None and name in divisions:
            states[name] = plan_state(tensor, divisions[name], "parameters", offload)
        else:
            states[name] = plan_state(tensor, division, zero, offload)
    return JobPlan(states=states)


def plan_state(tensor: Tensor, division: StateDivision | None, zero: ZeroLevel | None, offload: bool) -> StatePlan:
    """Return the plan of a tensor whose division is known."""
    return StatePlan(
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        value=division if zero == "parameters" else None,
        gradient=division if zero in ("gradients", "parameters") else None,
        optimizer_state=division,
        offloaded=offload and division is not None,
    )


def divide(parameter: Tensor, axis: MeshAxis) -> StateDivision | None:
    """Return the division of a parameter; None for one that is too small, or that leaves gaps in its memory."""
    shape, strides = tuple(parameter.shape), parameter.stride()
    if axis.size == 1 or not is_dense(shape, strides):
        return None
    found = divide_evenly(shape, order_dims(strides), axis.size)
    return None if found is None else StateDivision(axis=axis.name, dim=found[0], lengths=found[1])


def give_to(parameter: Tensor, mesh: Mesh, stage: int) -> StateDivision | None:
    """Return the division that gives a parameter to the worker of its stage; None for one without rows."""
    axis = next(axis for axis in mesh.axes if axis.role == "pipeline")
    owner = stage % axis.size
    if parameter.dim() == 0 or parameter.shape[0] == 0 or not is_dense(tuple(parameter.shape), parameter.stride()):
        return None
    lengths = tuple(parameter.shape[0] if worker == owner else 0 for worker in range(axis.size))
    return StateDivision(axis=axis.name, dim=0, lengths=lengths)


def assign(parameter: Tensor, axis: MeshAxis, loads: list[int]) -> StateDivision | None:
    """Return the division that gives a parameter to the worker with the fewest bytes; None for one without rows.

    Args:
        parameter: The parameter.
        axis: The workers.
        loads: The bytes of each worker, to which the parameter's are added.
    """
    if axis.size == 1 or parameter.dim() == 0 or not is_dense(tuple(parameter.shape), parameter.stride()):
        return None
    rank = loads.index(min(loads))
    loads[rank] += parameter.numel() * parameter.element_size()
    lengths = [0] * axis.size
    lengths[rank] = parameter.shape[0]
    return StateDivision(axis=axis.name, dim=0, lengths=tuple(lengths))

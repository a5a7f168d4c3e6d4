"""The plan that a job has if nobody gives another one: data parallelism, with the states divided that `zero=` names."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from rankless.ownership.optimizer_pieces import READS_WHOLE, list_parameters
from rankless.ownership.piece_layout import divide_evenly, is_dense, order_dims
from rankless.parallel.mesh import Mesh, MeshAxis, find_axis
from rankless.parallel.tensor_placement import split_lengths
from rankless.records.parallel_plan import JobPlan, StateDivision, StatePlan, ZeroLevel


def make_default_plan(
    tensors: Mapping[str, Tensor],
    optimizers: Sequence[Optimizer],
    mesh: Mesh,
    zero: ZeroLevel | None,
    offload: bool = False,
    given: Mapping[str, tuple[StateDivision, ...]] | None = None,
) -> JobPlan:
    """Return the plan of a job: data parallelism, with what other axes divide, and what `zero=` divides of that.

    Args:
        tensors: The job's parameters and buffers by name.
        optimizers: Its optimizers. A parameter of one that reads whole tensors belongs to one worker.
        mesh: The workers. The first axis with the role `data` divides states.
        zero: What is divided; None for nothing.
        offload: Whether the pieces lie in the memory of the host.
        given: How the axes `tensor`, `expert` and `pipeline` divide parameters, by name.
    """
    stepped = {id(item): optimizer for optimizer in optimizers for item in list_parameters(optimizer)}
    axis = find_axis(mesh, "data")
    loads = [0] * (1 if axis is None else axis.size)
    states: dict[str, StatePlan] = {}
    known: set[int] = set()
    for name, tensor in tensors.items():
        if id(tensor) in known:
            continue
        known.add(id(tensor))
        before, division = (given or {}).get(name, ()), None
        if axis is not None and zero is not None and isinstance(tensor, nn.Parameter) and id(tensor) in stepped:
            is_whole = type(stepped[id(tensor)]) in READS_WHOLE
            division = assign(tensor, axis, loads) if is_whole else divide(tensor, axis, before)
        states[name] = plan_state(tensor, before, division, zero, offload)
    return JobPlan(states=states)


def plan_state(
    tensor: Tensor,
    before: tuple[StateDivision, ...],
    division: StateDivision | None,
    zero: ZeroLevel | None,
    offload: bool,
) -> StatePlan:
    """Return the plan of a tensor.

    Args:
        tensor: The tensor.
        before: How it is divided of which no worker needs the whole.
        division: How `zero=` divides what that leaves; None if it does not.
        zero: What is divided so.
        offload: Whether a piece lies in the memory of the host.
    """
    after = () if division is None else (division,)
    return StatePlan(
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        value=(*before, *after) if zero == "parameters" else before,
        gradient=(*before, *after) if zero in ("gradients", "parameters") else before,
        optimizer_state=(*before, *after),
        offloaded=offload and division is not None,
    )


def divide(parameter: Tensor, axis: MeshAxis, before: Sequence[StateDivision]) -> StateDivision | None:
    """Return the division of a parameter; None for one that is too small, or that leaves gaps in its memory.

    Args:
        parameter: The parameter.
        axis: The workers.
        before: How other axes divide it first. Of what they leave, each worker gets rows.
    """
    shape, strides = list(parameter.shape), parameter.stride()
    if axis.size == 1 or not is_dense(shape, strides):
        return None
    whole = list(shape)
    for division in before:
        own = [length for length in division.lengths if length]
        if len(own) > 1:
            shape[division.dim] = division.blocks * min(own)
    found = divide_evenly(shape, order_dims(strides), axis.size)
    if found is None:
        return None
    return StateDivision(axis=axis.name, dim=found[0], lengths=split_lengths(whole[found[0]], axis.size))


def give_to(parameter: Tensor, axis: MeshAxis, owner: int) -> StateDivision | None:
    """Return the division that gives a parameter to one worker; None for one without rows."""
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

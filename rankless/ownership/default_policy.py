"""The plan that a job has if nobody gives another one: data parallelism, with the states divided that `zero=` names."""

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor, nn

from rankless.ownership.piece_layout import divide_evenly
from rankless.parallel.mesh import Mesh, MeshAxis
from rankless.records.parallel_plan import JobPlan, StateDivision, StatePlan, ZeroLevel


def make_default_plan(
    tensors: Mapping[str, Tensor], optimized: Collection[Tensor], mesh: Mesh, zero: ZeroLevel | None
) -> JobPlan:
    """Return the data-parallel plan of a job.

    Args:
        tensors: The job's parameters and buffers by name.
        optimized: The parameters that its optimizers step.
        mesh: The workers. The first axis with the role `data` divides states.
        zero: What is divided; None for nothing.
    """
    stepped = set(map(id, optimized))
    axis = next(axis for axis in mesh.axes if axis.role == "data")
    states: dict[str, StatePlan] = {}
    known: set[int] = set()
    for name, tensor in tensors.items():
        if id(tensor) in known:
            continue
        known.add(id(tensor))
        is_divided = zero is not None and isinstance(tensor, nn.Parameter) and id(tensor) in stepped
        states[name] = plan_state(tensor, divide(tensor, axis) if is_divided else None, zero)
    return JobPlan(states=states)


def plan_state(tensor: Tensor, division: StateDivision | None, zero: ZeroLevel | None) -> StatePlan:
    """Return the plan of a tensor whose division is known."""
    return StatePlan(
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        value=division if zero == "parameters" else None,
        gradient=division if zero in ("gradients", "parameters") else None,
        optimizer_state=division,
    )


def divide(parameter: Tensor, axis: MeshAxis) -> StateDivision | None:
    """Return the division of a parameter; None for one that is too small, or that leaves gaps in its memory."""
    shape, strides = tuple(parameter.shape), parameter.stride()
    if axis.size == 1 or not is_dense(shape, strides):
        return None
    order = sorted(range(parameter.dim()), key=lambda dim: (-strides[dim], dim))
    found = divide_evenly(shape, order, axis.size)
    return None if found is None else StateDivision(axis=axis.name, dim=found[0], lengths=found[1])


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether a tensor's elements fill a range of memory, each place once."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True

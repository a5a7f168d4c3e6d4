"""Decide how the axis `tensor` of the mesh divides the parameters of a job."""

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import Tensor, nn

from rankless.compiler.capture.graph_cleanup import named_tensors
from rankless.compiler.ir.logical_program import LogicalProgram
from rankless.compiler.tensor_parallel.division import WHOLE, DimRequest, TensorDivider
from rankless.context.world import World
from rankless.errors import ConfigError
from rankless.jobs.definition import JobDefinition
from rankless.ownership.optimizer_pieces import READS_WHOLE, list_parameters
from rankless.parallel.mesh import MeshAxis
from rankless.parallel.plan import Plan
from rankless.parallel.tensor_placement import BlockedShard, Shard
from rankless.records.parallel_plan import StateDivision


def find_tensor_divisions(
    program: LogicalProgram, job: JobDefinition, world: World, axis: MeshAxis
) -> dict[str, StateDivision]:
    """Return how the parameters of a job are divided along the axis `tensor`, by name; whole ones have no entry.

    A parameter that an earlier job has divided stays divided as it is.

    Args:
        program: A program of the job.
        job: The job.
        world: Has the owner of the parameters.
        axis: The axis.

    Raises:
        ConfigError: The job's plan names no parameter of it, or a dim that cannot be divided.
    """
    plan = job.plan or Plan()
    tensors = {name: item for name, item in named_tensors(job.modules).items() if isinstance(item, nn.Parameter)}
    requests = {} if plan.tensor == "auto" else read_requests(plan.tensor, tensors, job, axis)
    known: dict[str, Shard | BlockedShard] = {}
    for name, item in tensors.items():
        placement = world.owner.find_value_placements(item).get(axis.name)
        if placement is not None:
            known[name] = placement
            requests[name] = DimRequest(dim=placement.dim)
    whole = {id(item) for each in job.optimizers if type(each) in READS_WHOLE for item in list_parameters(each)}
    for name, item in tensors.items():
        if id(item) in whole and name not in requests:
            requests[name] = DimRequest(dim=WHOLE)
    found = TensorDivider(program, axis.size, requests).divide(fills=plan.tensor == "auto")
    return {name: describe_division(item, axis, tensors[name]) for name, item in (found | known).items()}


def describe_division(placement: Shard | BlockedShard, axis: MeshAxis, parameter: Tensor) -> StateDivision:
    """Return the placement of a parameter as a plan has it."""
    blocks = parameter.shape[placement.dim] // placement.block if isinstance(placement, BlockedShard) else 1
    return StateDivision(axis=axis.name, dim=placement.dim, lengths=placement.lengths, blocks=blocks)


def read_requests(
    given: Mapping[str, object], tensors: Mapping[str, Tensor], job: JobDefinition, axis: MeshAxis
) -> dict[str, DimRequest]:
    """Return what a plan wants of parameters, by name. Of several patterns for one parameter the last one holds.

    Args:
        given: Placements by pattern.
        tensors: The parameters of the job by name.
        job: The job.
        axis: The axis that divides them.
    """
    found: dict[str, DimRequest] = {}
    for pattern, placement in given.items():
        matched = [name for name in tensors if is_match(name, pattern)]
        if not matched:
            raise ConfigError(
                expected=f"in tensor= patterns for parameters of job {job.name!r}, such as {next(iter(tensors), '')!r}",
                found=f"{pattern!r}, which matches none of {len(tensors)}",
                fix="correct the name; print([name for name, _ in model.named_parameters()]) shows all",
                where=job.line,
            )
        for name in matched:
            found[name] = read_request(placement, name, tensors[name], job, axis)
    return found


def read_request(placement: object, name: str, parameter: Tensor, job: JobDefinition, axis: MeshAxis) -> DimRequest:
    """Return what a placement wants of a parameter. Raises `ConfigError` for a dim that cannot be divided."""
    dim = getattr(placement, "dim", None)
    if dim is None:
        return DimRequest(dim=WHOLE)
    shape = list(parameter.shape)
    if not -len(shape) <= dim < len(shape) or shape[dim] < axis.size:
        raise ConfigError(
            expected=f"for {name} of shape {shape} a dim with at least {axis.size} rows, one for each worker along the "
            "axis tensor",
            found=f"Shard({dim})",
            fix="name another dim in tensor=, or use Replicate()",
            where=job.line,
        )
    return DimRequest(dim=dim % len(shape))


def is_match(name: str, pattern: str) -> bool:
    """Return whether a pattern matches a parameter's name from the start or from after a dot."""
    while True:
        if fnmatchcase(name, pattern):
            return True
        _, dot, name = name.partition(".")
        if not dot:
            return False

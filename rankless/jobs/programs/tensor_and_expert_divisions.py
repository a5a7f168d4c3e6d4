"""Decide how the axes `tensor` and `expert` of the mesh divide the parameters of a job."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn

from rankless.compiler.capture.trace_to_program import named_tensors
from rankless.compiler.expert_parallel import ExpertDivider
from rankless.compiler.ir.logical_program import LogicalProgram
from rankless.compiler.tensor_parallel import WHOLE, DimRequest, TensorDivider
from rankless.context.world import World
from rankless.errors import ConfigError
from rankless.jobs.job_definition import JobDefinition
from rankless.ownership.step_on_shards import READS_WHOLE, list_parameters
from rankless.parallel.mesh import MeshAxis
from rankless.parallel.tensor_placement import BlockedShard, Shard, find_only_rank
from rankless.parallel.user_plan import Plan, list_placed
from rankless.records.parallel_plan import StateDivision


def find_layer_divisions(
    program: LogicalProgram, job: JobDefinition, world: World, axes: Sequence[MeshAxis]
) -> dict[str, tuple[StateDivision, ...]]:
    """Return how the parameters of a job are divided along the axes `tensor` and `expert`, by name.

    A parameter that an earlier job has divided stays divided as it is. Whole parameters have no entry.

    Args:
        program: A program of the job.
        job: The job.
        world: Has the owner of the parameters.
        axes: The axes, in the order in which they divide a parameter.

    Raises:
        ConfigError: The job's plan names no parameter of it, or a dim that cannot be divided.
    """
    tensors = {name: item for name, item in named_tensors(job.modules).items() if isinstance(item, nn.Parameter)}
    found: dict[str, dict[str, Shard | BlockedShard]] = {}
    for axis in sorted(axes, key=lambda axis: axis.role != "expert"):  # the axis `tensor` has what experts leave
        divided = next(iter(found.values()), {})
        before = {name: item.dim for name, item in divided.items() if find_only_rank(item) is None}
        found[axis.name] = find_divisions(program, job, world, axis, tensors, before)
    return {
        name: tuple(
            describe_division(found[axis.name][name], axis, tensor) for axis in axes if name in found[axis.name]
        )
        for name, tensor in tensors.items()
        if any(name in divided for divided in found.values())
    }


def find_divisions(
    program: LogicalProgram,
    job: JobDefinition,
    world: World,
    axis: MeshAxis,
    tensors: Mapping[str, Tensor],
    excluded: Mapping[str, int],
) -> dict[str, Shard | BlockedShard]:
    """Return how parameters are divided along one axis, by name.

    Args:
        program: A program of the job.
        job: The job.
        world: Has the owner of the parameters.
        axis: The axis.
        tensors: The job's parameters by name.
        excluded: The dims that another axis divides, by name.
    """
    plan = job.plan or Plan()
    is_expert = axis.role == "expert"
    given = plan.experts if is_expert else plan.tensor
    requests = read_annotations(tensors, job, axis)
    requests |= {} if given == "auto" else read_requests(given, tensors, job, axis)
    require_other_dims(requests, excluded, job)
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
    make = ExpertDivider if is_expert else TensorDivider
    found = make(program, axis.size, requests, excluded).divide(fills=given == "auto")
    found |= known
    if is_expert and not found:
        world.notify(
            f"{job.line}: job {job.name!r} has no parameters as (experts, inputs, outputs), and no modules that are "
            f"experts, of at least {axis.size} experts; the axis expert divides its batch only (name other parameters "
            "in rankless.Plan(experts=…))"
        )
    return found


def require_other_dims(requests: Mapping[str, DimRequest], excluded: Mapping[str, int], job: JobDefinition) -> None:
    """Raise `ConfigError` if a plan divides a dim of a parameter along two axes."""
    for name, request in requests.items():
        if request.dim is not WHOLE and excluded.get(name) == request.dim:
            raise ConfigError(
                expected=f"for {name} in tensor= another dim than that of experts",
                found=f"Shard({request.dim}), which the axis expert divides",
                fix="name another dim in tensor=, or use Replicate()",
                where=job.line,
            )


def describe_division(placement: Shard | BlockedShard, axis: MeshAxis, parameter: Tensor) -> StateDivision:
    """Return the placement of a parameter as a plan has it."""
    blocks = parameter.shape[placement.dim] // placement.block if isinstance(placement, BlockedShard) else 1
    return StateDivision(axis=axis.name, dim=placement.dim, lengths=placement.lengths, blocks=blocks)


def read_annotations(tensors: Mapping[str, Tensor], job: JobDefinition, axis: MeshAxis) -> dict[str, DimRequest]:
    """Return what the modules of a job want of their parameters, by name; see `rankless.place`.

    Args:
        tensors: The parameters of the job by name.
        job: The job.
        axis: The axis that divides them.
    """
    names = {id(item): name for name, item in tensors.items()}
    found: dict[str, DimRequest] = {}
    for root_name, root in job.modules.items():
        for module_name, module, placements in list_placed(root, axis.role):
            own = dict(module.named_parameters())
            for pattern, placement in placements.items():
                what = f"rankless.place names of parameters of {root_name}.{module_name}"
                for matched in match_names(pattern, own, what, "module", job):
                    item = own[matched]
                    found[names[id(item)]] = read_request(placement, names[id(item)], item, job, axis)
    return found


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
    option = "experts" if axis.role == "expert" else "tensor"
    found: dict[str, DimRequest] = {}
    for pattern, placement in given.items():
        what = f"{option}= patterns for parameters of job {job.name!r}"
        for name in match_names(pattern, tensors, what, "model", job):
            found[name] = read_request(placement, name, tensors[name], job, axis)
    return found


def match_names(pattern: str, known: Mapping[str, Tensor], what: str, owner: str, job: JobDefinition) -> list[str]:
    """Return the names of parameters that a pattern matches. Raises `ConfigError` if it matches none.

    Args:
        pattern: The pattern.
        known: The parameters by name.
        what: What the pattern is, for the error.
        owner: What has the parameters in the script, for the error.
        job: The job.
    """
    matched = [name for name in known if is_match(name, pattern)]
    if not matched:
        raise ConfigError(
            expected=f"in {what}, such as {next(iter(known), '')!r}",
            found=f"{pattern!r}, which matches none of {len(known)}",
            fix=f"correct the name; print([name for name, _ in {owner}.named_parameters()]) shows all",
            where=job.line,
        )
    return matched


def read_request(placement: object, name: str, parameter: Tensor, job: JobDefinition, axis: MeshAxis) -> DimRequest:
    """Return what a placement wants of a parameter. Raises `ConfigError` for a dim that cannot be divided."""
    option = "experts" if axis.role == "expert" else "tensor"
    dim = getattr(placement, "dim", None)
    if dim is None:
        return DimRequest(dim=WHOLE)
    shape = list(parameter.shape)
    if not -len(shape) <= dim < len(shape) or shape[dim] < axis.size:
        raise ConfigError(
            expected=f"for {name} of shape {shape} a dim with at least {axis.size} rows, one for each worker along the "
            f"axis {axis.name}",
            found=f"Shard({dim})",
            fix=f"name another dim in {option}=, or use Replicate()",
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

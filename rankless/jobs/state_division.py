"""The plan of one job, and the division of its states between workers as the plan says.

`make_default_plan` makes it if the run has no plan: data parallelism, with the states divided that `zero=` names.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from rankless.compiler.capture.trace_to_program import named_tensors
from rankless.context.world import World
from rankless.data.logical_tensor import LogicalTensor
from rankless.errors import ConfigError
from rankless.jobs.arguments import FlattenedArguments, PositionDims, find_batch_dim, name_argument
from rankless.jobs.job_definition import JobDefinition
from rankless.jobs.optimizer_step import count_group_parameters
from rankless.jobs.programs.pipelines import choose_copies, choose_owner, count_microbatches
from rankless.ownership.modules_with_states_elsewhere import list_extension_modules
from rankless.ownership.shard_layout import GATHER_BYTES, assign, divide, give_to, group_in_order
from rankless.ownership.sharded_state_owner import ShardedStateOwner
from rankless.ownership.step_on_shards import READS_WHOLE, list_parameters, require_divisible
from rankless.parallel.mesh import Mesh, find_axis, find_pipeline_axis, list_layer_axes
from rankless.parallel.tensor_placement import Shard, Sharding
from rankless.parallel.user_plan import Plan
from rankless.records.parallel_plan import JobPlan, PipelinePlan, StateDivision, StatePlan, ZeroLevel

GROUPS = 32
"""So many groups of a large model's parameters are divided one after the other."""
NEW_PLAN = "make a new plan with `rankless plan --save`"


class PlannedDivision:
    """Divides the states of one job at its first call, and those that optimizers get later."""

    def __init__(self, job: JobDefinition, world: World) -> None:
        self._job = job
        self._world = world
        self._settings = job.plan or Plan()
        self._known: list[Any] | None = None
        self._given = None if world.settings.plan is None else find_job_plan(job, world.settings.plan.jobs)
        self._batch_dims: dict[Hashable, tuple[int | None, ...]] = {}
        self._arguments: dict[str, int | None] = {}
        self._positions: dict[str, int | None] = {}
        self._stages: Mapping[str, int] | None = None
        """The stage of each parameter in a pipeline, once it is known."""
        self._divisions: Mapping[str, tuple[StateDivision, ...]] | None = None
        """How the axes `tensor` and `expert` divide parameters, once it is known."""
        self.pipeline = find_pipeline_axis(world.mesh)
        self.layer_axes = list_layer_axes(world.mesh)
        self._position_dims: PositionDims | None = None
        if find_axis(world.mesh, "sequence") is not None:
            self._position_dims = PositionDims(job, None if self._given is None else self._given.positions)
        if self._given is not None and self._given.pipeline is not None:
            self.take_stages(self._given.pipeline.stages)

    @property
    def plan(self) -> JobPlan:
        """The plan by which the job runs."""
        job = self._job
        tensors = named_tensors(job.modules)
        options = job.step_options
        made = make_default_plan(
            tensors, job.optimizers, self._world.mesh, options.zero, options.offload, self._list_given(tensors)
        )
        return JobPlan(
            states=made.states if self._given is None else self._given.states,
            arguments=self._arguments,
            positions=self._positions,
            recompute=job.recomputed_fraction,
            sequence_parallel=self._settings.sequence_parallel,
            pipeline=None
            if self.pipeline is None
            else PipelinePlan(
                schedule=self._settings.schedule,
                microbatches=count_microbatches(self._settings, self.pipeline),
                stages={name: stage for name, stage in (self._stages or {}).items() if name in made.states},
            ),
        )

    def _list_given(self, tensors: Mapping[str, Tensor]) -> dict[str, tuple[StateDivision, ...]]:
        """Return how the axes `tensor`, `expert` and `pipeline` divide parameters, by name, in this order."""
        stepped = {id(item) for optimizer in self._job.optimizers for item in list_parameters(optimizer)}
        found: dict[str, tuple[StateDivision, ...]] = {}
        stand_ins = {id(part.weight) for part in list_extension_modules(self._job.modules.values())}
        for name, tensor in tensors.items():
            if id(tensor) in stand_ins:  # for states that all workers step together
                continue
            divisions = (self._divisions or {}).get(name, ())
            if self.pipeline is not None and name in (self._stages or {}) and id(tensor) in stepped:
                owner = choose_owner(tensor, (self._stages or {})[name], self.pipeline, self._world.pipeline.owners)
                along_pipeline = give_to(tensor, self.pipeline, owner)
                divisions = (*divisions, along_pipeline) if along_pipeline is not None else divisions
            if divisions:
                found[name] = divisions
        return found

    def divide_arguments(self, arguments: FlattenedArguments) -> FlattenedArguments:
        """Return a call's arguments with the batch dims of the plan that was given, if one was, and dims of positions.

        Raises:
            ConfigError: The plan has other arguments, or a loader has divided one in another way.
        """
        if self._given is not None:
            arguments = self._divide_as_planned(arguments, self._given)
        return arguments if self._position_dims is None else self._position_dims.apply(arguments)

    def _divide_as_planned(self, arguments: FlattenedArguments, given: JobPlan) -> FlattenedArguments:
        """Return a call's arguments with the batch dims of a plan."""
        key = arguments.spec, arguments.plain
        if key not in self._batch_dims:
            names = [name_argument(self._job.function, arguments, place) for place in range(len(arguments.tensors))]
            unknown = [name for name in names if name not in given.arguments]
            if unknown:
                raise ConfigError(
                    expected=f"the tensor arguments of job {self._job.name!r} in the plan: "
                    f"{', '.join(given.arguments) or 'none'}",
                    found=unknown[0],
                    fix=NEW_PLAN,
                    where=self._job.line,
                )
            self._batch_dims[key] = tuple(given.arguments[name] for name in names)
        dims = self._batch_dims[key]
        for tensor, dim in zip(arguments.tensors, dims, strict=True):
            if (
                isinstance(tensor, LogicalTensor)
                and isinstance(tensor.placement, Shard)
                and tensor.placement.dim != dim
            ):
                raise ConfigError(
                    expected=f"batches of loaders divided along dim {tensor.placement.dim} in the plan of job "
                    f"{self._job.name!r}",
                    found=f"dim {dim}" if dim is not None else "a whole argument",
                    fix=NEW_PLAN,
                    where=self._job.line,
                )
        return replace(arguments, batch_dims=dims)

    def note_arguments(self, arguments: FlattenedArguments, shardings: tuple[Sharding, ...]) -> None:
        """Note how the arguments of a call are divided, for a plan to save."""
        for place, sharding in enumerate(shardings):
            found = {
                axis.role: item.dim
                for axis, item in zip(self._world.mesh.axes, sharding, strict=True)
                if isinstance(item, Shard)
            }
            dim, name = found.get("data", found.get("expert")), name_argument(self._job.function, arguments, place)
            if self.pipeline is not None and dim is None:
                dim = find_batch_dim(arguments, place)
            self._arguments.setdefault(name, dim)
            if self._position_dims is not None:
                self._positions.setdefault(name, found.get("sequence"))

    @property
    def needs_program(self) -> bool:
        """Whether the division of a train job's parameters depends on its program, and is not known yet."""
        is_open = (self.pipeline is not None and self._stages is None) or (
            bool(self.layer_axes) and self._divisions is None
        )
        return is_open and self._job.trains and self._given is None

    def take_stages(self, stages: Mapping[str, int]) -> None:
        """Let the next update divide parameters between the stages of a pipeline.

        Args:
            stages: The stage of each parameter by name.
        """
        self._stages = stages
        tensors = named_tensors(self._job.modules)
        for name, stage in stages.items():
            if name in tensors:
                self._world.pipeline.stages.setdefault(tensors[name], stage)

    def take_divisions(self, divisions: Mapping[str, tuple[StateDivision, ...]]) -> None:
        """Let the next update divide parameters along the axes `tensor` and `expert`.

        Args:
            divisions: How each parameter that is divided is divided, by name.
        """
        self._divisions = dict(divisions)

    @property
    def is_up_to_date(self) -> bool:
        """Whether there is nothing to divide."""
        job = self._job
        is_decided = self._given is not None or self._divisions is not None or self._stages is not None
        divides = job.step_options.zero is not None or is_decided
        if self.needs_program or not isinstance(self._world.owner, ShardedStateOwner) or not divides:
            return True
        return count_group_parameters(job) == self._known

    def update(self, complete: Callable[[str, Tensor], None] | None = None) -> bool:
        """Divide states that are not divided yet. Return whether there were any. Collective if there are.

        Whole parameters are freed group by group.

        Args:
            complete: Called with the name of a tensor that is about to be divided, and the tensor, which has a value
                afterwards. Each tensor is then freed before the next. Default: all have values.

        Raises:
            ConfigError: The plan is for another model.
        """
        if self.is_up_to_date:
            return False
        job, owner = self._job, self._world.owner
        assert isinstance(owner, ShardedStateOwner)
        self._known = count_group_parameters(job)
        tensors = named_tensors(job.modules)
        plan = self.plan
        if self._given is not None:
            require_same_states(job, plan.states, tensors, with_dtypes=self._world.settings.dtype is None)
        if plan.divides_states:
            divided = {id(tensors[name]) for name, state in plan.states.items() if state.optimizer_state}
            for optimizer in job.optimizers:
                if any(id(item) in divided for item in list_parameters(optimizer)):
                    require_divisible(optimizer, job=job.name, line=job.line)
            require_whole_tensors(job, plan, tensors)
        before = owner.version
        owner.note_optimizers(job.optimizers)
        names_divided = [name for name, state in plan.states.items() if state.optimizer_state]
        for names in group_by_size(names_divided, tensors):
            group = JobPlan(states={name: plan.states[name] for name in names})
            owner.divide(group, tensors, line=job.line, complete=complete, copies=self._list_copies(names, tensors))
        return owner.version != before

    def _list_copies(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
        """Return the workers with copies of parameters, by name, where the worker that has one may be lost."""
        axis, stages, owners = self.pipeline, self._stages or {}, self._world.pipeline.owners
        if axis is None or not axis.stage_workers or self._world.recovery is None:
            return {}
        known = [name for name in names if name in stages and tensors[name] in owners]
        return {name: choose_copies(owners[tensors[name]], axis.stage_workers[stages[name]]) for name in known}


def apply_plan(job: JobDefinition, world: World) -> JobDefinition:
    """Return a job with what the plan of the run says of its program, if the run has a plan."""
    if world.settings.plan is None:
        return job
    planned = find_job_plan(job, world.settings.plan.jobs)
    pipeline = planned.pipeline
    plan = Plan(sequence_parallel=planned.sequence_parallel)
    if pipeline is not None:
        plan = replace(plan, schedule=pipeline.schedule, microbatches=pipeline.microbatches)
    return replace(job, recompute=planned.recompute or None, plan=plan)


def group_by_size(names: Sequence[str], tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Group the names of tensors, in their order, up to a size that is small against all of them.

    A group whose workers share memory takes one memory, which takes a file descriptor.
    """
    sizes = {name: tensors[name].numel() * tensors[name].element_size() for name in names}
    limit = max(GATHER_BYTES, sum(sizes.values()) // GROUPS)
    return group_in_order(names, kind=lambda _name: None, size=sizes.__getitem__, limit=lambda _name, _groups: limit)


def find_job_plan(job: JobDefinition, jobs: Mapping[str, JobPlan]) -> JobPlan:
    """Return the plan of a job in the plan of a run. Raises `ConfigError` if there is none."""
    if job.name not in jobs:
        raise ConfigError(
            expected=f"a job that the plan has: {', '.join(jobs) or 'none'}",
            found=f"job {job.name!r}",
            fix=f"{NEW_PLAN}, with --steps so that the script calls the job by then",
            where=job.line,
        )
    return jobs[job.name]


def require_whole_tensors(job: JobDefinition, plan: JobPlan, tensors: Mapping[str, Tensor]) -> None:
    """Raise `ConfigError` if a plan divides a parameter between workers whose optimizer reads whole tensors."""
    whole = {id(item) for each in job.optimizers if type(each) in READS_WHOLE for item in list_parameters(each)}
    for name, state in plan.states.items():
        for division in state.optimizer_state:
            if id(tensors[name]) in whole and len([size for size in division.lengths if size]) > 1:
                raise ConfigError(
                    expected=f"{name} on one worker in the plan, because its optimizer reads whole tensors",
                    found=f"the lengths {list(division.lengths)}",
                    fix=NEW_PLAN,
                    where=job.line,
                )


def require_same_states(
    job: JobDefinition,
    planned: Mapping[str, StatePlan],
    tensors: Mapping[str, Tensor],
    *,
    with_dtypes: bool,
) -> None:
    """Raise `ConfigError` if a plan is for another model.

    Args:
        job: The job.
        planned: The states in its plan.
        tensors: The parameters and buffers that it has.
        with_dtypes: Whether the dtypes must be the same too; `rankless verify` may run a script in another one.
    """
    dtypes = {name: f"{str(item.dtype).removeprefix('torch.')} " * with_dtypes for name, item in tensors.items()}
    found = {name: f"{dtypes[name]}{list(item.shape)}" for name, item in tensors.items()}
    for name, state in planned.items():
        wanted = f"{state.dtype} " * with_dtypes + str(list(state.shape))
        if found.get(name) != wanted:
            raise ConfigError(
                expected=f"{name} as {wanted} in the model of job {job.name!r}, for which the plan was made",
                found=found.get(name, "no such parameter or buffer"),
                fix=NEW_PLAN,
                where=job.line,
            )
    known = {id(tensors[name]) for name in planned}
    new = [name for name, item in tensors.items() if id(item) not in known]
    if new:
        raise ConfigError(
            expected=f"the model of job {job.name!r} for which the plan was made",
            found=f"{new[0]}, which the plan does not have",
            fix=NEW_PLAN,
            where=job.line,
        )


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
        offload: Whether the shards lie in the memory of the host.
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
        offload: Whether a shard lies in the memory of the host.
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

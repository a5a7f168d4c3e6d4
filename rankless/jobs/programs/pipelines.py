"""Compile the programs of a job for the axis `pipeline`, and choose the workers of its stages and parameters."""

import math
from array import array
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence

from torch import Tensor, nn

from rankless.collectives.byte_messages import broadcast_bytes
from rankless.compiler.capture.trace_to_program import named_tensors
from rankless.compiler.ir.logical_program import LogicalProgram
from rankless.compiler.local_program import LocalProgram
from rankless.compiler.pipeline_parallel.build_pipeline_program import build_pipeline_program
from rankless.compiler.pipeline_parallel.schedules import INTERLEAVED_STAGES, StageWorkers, make_schedule
from rankless.compiler.pipeline_parallel.stage_value_streams import GroupTransport
from rankless.compiler.pipeline_parallel.stages import PipelineOptions, Stages, find_stages, measure_work
from rankless.compiler.probing.operator_probe import OperatorProbe
from rankless.compiler.scheduling.gradient_buckets_and_state_storage import StateStorage
from rankless.context.world import World
from rankless.errors import ConfigError
from rankless.jobs.arguments import FlattenedArguments, find_batch_dim
from rankless.jobs.job_definition import JobDefinition
from rankless.parallel.batch_division import BatchDivision
from rankless.parallel.mesh import MeshAxis, find_pipeline_axis
from rankless.parallel.tensor_placement import Shard, Sharding, split_lengths
from rankless.parallel.user_plan import MICROBATCHES_PER_WORKER, Plan

MOST_TURNS = 4
"""So many times as many microbatches as workers of a kind a batch has by default, at most."""


def find_stage_workers(axis: MeshAxis, stages: int) -> StageWorkers:
    """Return the workers of each stage.

    Args:
        axis: The axis `pipeline`.
        stages: The number of stages. Where workers are heterogeneous it is the number of their kinds.
    """
    if axis.stage_workers:
        return StageWorkers(axis.stage_workers)
    return StageWorkers.alternate(stages=stages, workers=axis.size)


def count_microbatches(plan: Plan, axis: MeshAxis) -> int:
    """Return the number of microbatches of a batch with enough samples.

    Heterogeneous workers have by default two each, and all workers of a kind have as many, if that takes not too many.

    Args:
        plan: The plan of a job.
        axis: The axis `pipeline`.
    """
    if not axis.stage_workers or plan.microbatches is not None:
        return plan.count_microbatches(axis.size)
    sizes = [len(workers) for workers in axis.stage_workers]
    wanted, common = MICROBATCHES_PER_WORKER * max(sizes), math.lcm(*sizes)
    return wanted if common > MOST_TURNS * max(sizes) else -(-wanted // common) * common


def choose_owner(tensor: Tensor, stage: int, axis: MeshAxis, owners: MutableMapping[Tensor, int]) -> int:
    """Return the worker that has a parameter: of the workers of its stage the one with the fewest bytes.

    Args:
        tensor: The parameter.
        stage: Its stage.
        axis: The axis `pipeline`.
        owners: The workers of parameters, which gets this one's.
    """
    if tensor not in owners:
        loads = count_loads(owners)
        workers = axis.stage_workers[stage] if axis.stage_workers else (stage % axis.size,)
        owners[tensor] = min(workers, key=lambda worker: loads.get(worker, 0))
    return owners[tensor]


def choose_copies(owner: int, workers: Sequence[int]) -> tuple[int, ...]:
    """Return the workers with copies of what one worker has, so that it may be lost: the next one of its kind, if any.

    Args:
        owner: The worker that has it.
        workers: The workers of its kind.
    """
    after = workers[(workers.index(owner) + 1) % len(workers)]
    return () if after == owner else (after,)


def count_loads(owners: Mapping[Tensor, int]) -> dict[int, int]:
    """Return the bytes of the parameters of each worker."""
    loads: dict[int, int] = {}
    for tensor, worker in owners.items():
        loads[worker] = loads.get(worker, 0) + tensor.numel() * tensor.element_size()
    return loads


class Pipelines:
    """Cuts the programs of one job into stages. Jobs that share parameters have the stages of the first one."""

    def __init__(self, job: JobDefinition, world: World) -> None:
        self._job = job
        self._world = world
        self._plan = job.plan or Plan()
        self.axis = find_pipeline_axis(world.mesh)
        """The axis `pipeline` of the mesh; None if it has none."""

    def _count_stages(self, known: Collection[int]) -> int:
        """Return the number of stages: as many as an earlier job has, or as the plan says."""
        workers = 1 if self.axis is None else self.axis.size
        if self.axis is not None and self.axis.stage_workers:
            return len(self.axis.stage_workers)
        if known:
            return workers * (max(known) // workers + 1)
        return workers * (INTERLEAVED_STAGES if self._plan.schedule == "interleaved" else 1)

    def find_stages(self, program: LogicalProgram) -> Stages:
        """Return the stages of a program of the job. Collective if the plan has them measured.

        Raises:
            ConfigError: The job's plan names other modules, or a stage has no parameters.
        """
        tensors = named_tensors(self._job.modules)
        first: dict[int, str] = {}
        names = {
            name: first.setdefault(id(item), name) for name, item in tensors.items() if isinstance(item, nn.Parameter)
        }
        if self.axis is not None and self.axis.stage_workers:
            return self._find_kinds(program, names, tensors)
        known = self._find_known(names, tensors)
        count = self._count_stages(known.values())
        if known:
            return find_stages(program, count, names, known)
        work = self._measure(program) if self._plan.stages == "measured" and count > 1 else None
        stages = find_stages(program, count, names, borders=self._read_borders(program, count), work=work)
        if self._job.trains:
            self._require_parameters(stages)
        return stages

    def _find_known(self, names: Iterable[str], tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the stages of those of the parameters that another program has placed already."""
        placed = self._world.pipeline.stages
        return {name: placed[tensors[name]] for name in names if tensors[name] in placed}

    def _find_kinds(self, program: LogicalProgram, names: Mapping[str, str], tensors: Mapping[str, Tensor]) -> Stages:
        """Return the stages of a program for workers of several kinds, as the extension says that has the kinds."""
        known = self._find_known(names, tensors)
        stages: Stages | None = self._world.joint.find_stages(self._job, program, names, known)
        if stages is None:
            raise ConfigError(
                expected="an extension that says what each kind of workers computes",
                found=f"none for job {self._job.name!r}",
                fix="start the run with the command line of that extension",
                where=self._job.line,
            )
        return stages

    def _measure(self, program: LogicalProgram) -> Sequence[float]:
        """Return the seconds of operators on rank 0. The other ranks wait, so that nothing disturbs it. Collective."""
        mesh = self._world.mesh
        if mesh.rank == 0:
            self._world.notify(f"job {self._job.name!r}: the operators are measured, to balance the stages; ranks wait")
        seconds = array("d", measure_work(program) if mesh.rank == 0 else ())
        return array("d", broadcast_bytes(seconds.tobytes(), mesh=mesh))

    def _require_parameters(self, stages: Stages) -> None:
        """Raise `ConfigError` if a stage has no parameters: its worker would have next to nothing to do."""
        without = sorted(set(range(stages.count)) - set(stages.owners.values()))
        if without:
            raise ConfigError(
                expected=f"{stages.count} stages of the models of job {self._job.name!r}, each with parameters",
                found=f"none for stage {without[0]}",
                fix="use fewer workers along the axis pipeline, or name other modules with stages=",
                where=self._job.line,
            )

    def _read_borders(self, program: LogicalProgram, count: int) -> Sequence[str] | None:
        """Return the modules at which the plan lets stages begin; None if it has none."""
        given = self._plan.stages
        if given is None or given == "measured":
            return None
        used = {node.meta["module"].path for node in program.graph.nodes if node.meta.get("module") is not None}
        unknown = [name for name in given if not any(path == name or path.startswith(f"{name}.") for path in used)]
        if len(given) != count - 1 or unknown:
            raise ConfigError(
                expected=f"stages= with {count - 1} modules that job {self._job.name!r} runs, for {count} stages",
                found=f"{unknown[0]!r}, which it does not run" if unknown else f"{len(given)}: {', '.join(given)}",
                fix="name the module at which each stage after the first begins, or omit stages=",
                where=self._job.line,
            )
        return given

    def build(
        self,
        program: LogicalProgram,
        arguments: FlattenedArguments,
        shardings: Sequence[Sharding],
        storage: StateStorage,
        probe: OperatorProbe | None,
    ) -> LocalProgram:
        """Compile a program for this worker of the pipeline."""
        axis, mesh = self.axis, self._world.mesh
        assert axis is not None, "the mesh has no axis pipeline"
        lengths, count = divide_into_microbatches(
            arguments, shardings, BatchDivision.of(mesh), count_microbatches(self._plan, axis), mesh.axes
        )
        exchanged = [
            None if rows is None or count == 1 else find_exchanged(sharding, rows.dim, mesh.axes)
            for sharding, rows in zip(shardings, lengths, strict=True)
        ]
        stages = self.find_stages(program)
        stage_workers = find_stage_workers(axis, stages.count)
        trains = any(output.kind == "gradient" for _, output in program.outputs)
        options = PipelineOptions(
            axis=axis,
            stages=stages,
            stage_workers=stage_workers,
            schedule=make_schedule(
                self._plan.schedule,
                workers=axis.size,
                stage_workers=stage_workers,
                microbatches=count,
                trains=trains,
            ),
            microbatches=count,
            batch_lengths=lengths,
            transport=GroupTransport(axis),
            exchanged=tuple(exchanged),
        )
        return build_pipeline_program(program, shardings, mesh, options, storage=storage, probe=probe)


def divide_into_microbatches(
    arguments: FlattenedArguments,
    shardings: Sequence[Sharding],
    division: BatchDivision,
    wanted: int,
    axes: Sequence[MeshAxis],
) -> tuple[tuple[Shard | None, ...], int]:
    """Return how microbatches divide the part of each argument that the axes outside of them leave, and their number.

    Every worker chooses the same arguments and number, from the whole batch.

    Args:
        arguments: The arguments of a call.
        shardings: Their shardings.
        division: The division of batches along the data axes.
        wanted: The number of microbatches for a batch with enough samples.
        axes: The axes of the mesh.
    """
    dims = [find_batch_dim(arguments, position) for position in range(len(arguments.tensors))]
    rows = [
        0 if dim is None else tensor.shape[dim] // division.count
        for tensor, dim in zip(arguments.tensors, dims, strict=True)
    ]
    count = max(1, min(wanted, max(rows, default=1)))
    found: list[Shard | None] = []
    for tensor, dim, known, sharding in zip(arguments.tensors, dims, rows, shardings, strict=True):
        if known < count or dim is None:
            found.append(None)
            continue
        local = tensor.shape[dim]
        for axis, placement in zip(axes, sharding, strict=True):
            # The axis `expert` divides each microbatch, if there are several; see Note [arguments of microbatches].
            is_outside = axis.role != "expert" or count == 1
            if isinstance(placement, Shard) and placement.dim == dim and is_outside:
                local = placement.lengths[axis.rank]
        found.append(Shard(dim, split_lengths(local, count)))
    return tuple(found), count


def find_exchanged(sharding: Sharding, dim: int, axes: Sequence[MeshAxis]) -> Shard | None:
    """Return how the axis `expert` divides the rows of an argument; None if it does not."""
    for axis, placement in zip(axes, sharding, strict=True):
        if axis.role == "expert" and isinstance(placement, Shard) and placement.dim == dim:
            return placement
    return None

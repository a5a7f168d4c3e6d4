"""The facts of a job that its picture shows, from the records of a run."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rankless.plan_picture.holdings import (
    HeldTensor,
    Holding,
    WorkerGrid,
    count_held,
    count_tensor_bytes,
    describe_holdings,
)
from rankless.records.job_programs import DefinedJob, JobMemory, JobProgram, PipelineRecord, ProgramRecord
from rankless.records.number_formatting import format_decimal_bytes
from rankless.records.parallel_plan import JobPlan, PlannedAxis
from rankless.records.program_by_module import ModuleGroup, group_by_module

NO_PLAN = JobPlan(states={})


@dataclass(frozen=True, kw_only=True)
class PicturedMove:
    """Moves of one kind along one axis for one module, at one line of the script, all together."""

    kind: str
    axis: str
    backward: bool
    line: str
    count: int
    """Their number. Of moves of several modules together, each module counts one."""
    value_bytes: int
    sent_bytes: int
    """What a worker sends."""
    reasons: tuple[str, ...]

    @property
    def direction(self) -> str:
        """Whether it belongs to the computation of gradients, in a word."""
        return "backward" if self.backward else "forward"

    @property
    def name(self) -> str:
        """Its kind and number, as "all_gather x 12"."""
        return f"{self.kind} x {self.count}" if self.count > 1 else self.kind


@dataclass(frozen=True, kw_only=True)
class PicturedModule:
    """A module, or repeated layers: its parameters, who holds them, and what moves for it."""

    name: str
    parameter_bytes: int
    tensors: tuple[HeldTensor, ...]
    holdings: tuple[Holding, ...]
    moves: tuple[PicturedMove, ...]


SAME = 0.02
"""The part by which workers may differ that are shown as one."""


@dataclass(frozen=True, kw_only=True)
class WorkerMemory:
    """What some workers hold of a job.

    Attributes:
        workers (tuple[int, ...]): The workers, which hold about as much.
        sizes (dict[str, int]): The bytes of each kind, none for a kind that is not known.
        is_measured (bool): Whether one of them was measured. Else gradients and optimizer state are in proportion to
            what the first worker has of them.
    """

    workers: tuple[int, ...]
    sizes: dict[str, int]
    is_measured: bool

    @property
    def total(self) -> int:
        """The bytes of all kinds."""
        return sum(self.sizes.values())


def estimate_memory(memory: JobMemory | None, tensors: Sequence[HeldTensor], grid: WorkerGrid) -> list[WorkerMemory]:
    """Return the memory of all workers, those that hold as much together. None without a measurement.

    Args:
        memory: What was measured on the first worker.
        tensors: The parameters of the job.
        grid: The workers.
    """
    if memory is None:
        return []
    held = list(
        zip(
            count_held(tensors, grid, "parameters"),
            count_held(tensors, grid, "gradients"),
            count_held(tensors, grid, "optimizer state"),
            strict=True,
        )
    )
    groups = group_workers(held, grid)
    measured = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer state": memory.optimizer_state,
    }
    found = []
    for workers in groups:
        sizes = held[workers[0]]
        if workers[0] == 0:
            kinds = measured | {"activations": memory.activations or 0, "buffers": memory.buffers}
            kinds |= {"copies": memory.copies} if memory.copies else {}
        else:
            parts = zip(measured.items(), sizes, held[0], strict=True)
            kinds = {kind: size * own // first for (kind, size), own, first in parts if first}
            kinds |= {"parameters": sizes[0], "buffers": memory.buffers}
            kinds |= {"copies": memory.copies} if memory.copies else {}
        found.append(
            WorkerMemory(
                workers=tuple(workers),
                sizes={kind: size for kind, size in kinds.items() if size},
                is_measured=workers[0] == 0,
            )
        )
    return found


def group_workers(held: Sequence[tuple[int, ...]], grid: WorkerGrid) -> list[list[int]]:
    """Return the workers in groups that hold about as much. Stages of a pipeline have groups of their own, because
    their activations differ.

    Args:
        held: What each worker holds.
        grid: The workers.
    """
    pipelines = [axis.name for axis in grid.axes if axis.role == "pipeline"]
    groups: dict[tuple[int, ...], list[list[int]]] = {}
    for worker, sizes in enumerate(held):
        ranks = grid.find_ranks(worker)
        same_stage = groups.setdefault(tuple(ranks[axis] for axis in pipelines), [])
        for group in same_stage:
            pairs = zip(sizes, held[group[0]], strict=True)
            if all(abs(one - other) <= SAME * max(one, other) for one, other in pairs):
                group.append(worker)
                break
        else:
            same_stage.append([worker])
    return [group for same_stage in groups.values() for group in same_stage]


@dataclass(frozen=True, kw_only=True)
class PicturedJob:
    """A job's program for one kind of call.

    Attributes:
        title (str): Its kind, name and line.
        program (JobProgram): Its record.
        grid (WorkerGrid): The workers.
        inputs (tuple[str, ...]): Its inputs other than parameters, in words.
        modules (tuple[PicturedModule, ...]): Its modules, as `rankless plan` groups them.
        unused (tuple[HeldTensor, ...]): Parameters and buffers of its models that this program does not take.
        memory (tuple[WorkerMemory, ...]): The memory of all workers.
    """

    title: str
    program: JobProgram
    grid: WorkerGrid
    inputs: tuple[str, ...]
    modules: tuple[PicturedModule, ...]
    unused: tuple[HeldTensor, ...]
    memory: tuple[WorkerMemory, ...]

    @property
    def pipeline(self) -> PipelineRecord | None:
        """Its stages, on a mesh with the axis `pipeline`."""
        return self.program.pipeline

    @property
    def sent_bytes(self) -> int:
        """What a worker sends in a call."""
        return sum(move.sent_bytes for move in self.program.moves)


@dataclass(frozen=True, kw_only=True)
class PicturedPlan:
    """All jobs of a script, and in words those that have no program."""

    script: str
    jobs: tuple[PicturedJob, ...]
    others: tuple[str, ...]


def collect_plan(script: str, records: Iterable[ProgramRecord], axes: Sequence[PlannedAxis]) -> PicturedPlan:
    """Return the facts of all jobs.

    Args:
        script: The program that ran, as on the command line.
        records: What it recorded.
        axes: The axes of the mesh, from the outermost.
    """
    known = list(records)
    grid = WorkerGrid(tuple(axes))
    programs = [record for record in known if isinstance(record, JobProgram)]
    defined = {(record.job, record.line): record for record in known if isinstance(record, DefinedJob)}
    compiled = {(program.job, program.line) for program in programs}
    return PicturedPlan(
        script=script,
        jobs=tuple(collect_job(program, defined.get((program.job, program.line)), grid) for program in programs),
        others=tuple(
            f"job {job.job} ({os.path.basename(job.line)}) "
            + ("is not compiled, so it has no plan" if job.called else "was not called")
            for key, job in defined.items()
            if key not in compiled
        ),
    )


def collect_job(program: JobProgram, defined: DefinedJob | None, grid: WorkerGrid) -> PicturedJob:
    """Return the facts of one program of a job."""
    plan = (defined.plan if defined is not None else None) or NO_PLAN
    tensors = {item.name: item for item in collect_tensors(program, plan)}
    taken = {item.name for item in program.inputs}
    buffers = {item.name for item in program.inputs if item.kind == "buffer"}
    kind = "train job" if program.trains else "predict job"
    return PicturedJob(
        title=f"{kind} {program.job} ({os.path.basename(program.line)})",
        program=program,
        grid=grid,
        inputs=tuple(describe_inputs(program)),
        modules=tuple(collect_module(group, tensors, grid, program) for group in group_by_module(program)),
        unused=tuple(item for name, item in tensors.items() if name not in taken),
        memory=tuple(
            estimate_memory(
                None if defined is None else defined.memory,
                [item for name, item in tensors.items() if name not in buffers],
                grid,
            )
        ),
    )


def collect_tensors(program: JobProgram, plan: JobPlan) -> Iterable[HeldTensor]:
    """Yield the parameters and buffers of a job: those that its program takes, and all others of its models."""
    stages = {} if plan.pipeline is None else plan.pipeline.stages
    known = {item.name: item for item in program.inputs if item.kind in ("parameter", "buffer")}
    for name in dict.fromkeys([*known, *plan.states]):
        state, item = plan.states.get(name), known.get(name)
        described = item or state
        assert described is not None
        yield HeldTensor(
            name=name,
            bytes=count_tensor_bytes(described.shape, described.dtype) if item is None else item.bytes,
            shape=described.shape,
            dtype=described.dtype,
            plan=state,
            stage=stages.get(name),
        )


def collect_module(
    group: ModuleGroup, tensors: dict[str, HeldTensor], grid: WorkerGrid, program: JobProgram
) -> PicturedModule:
    """Return the facts of a module."""
    own = tuple(tensors[name] for name in group.parameters)
    return PicturedModule(
        name=group.label,
        parameter_bytes=group.parameter_bytes,
        tensors=own,
        holdings=tuple(describe_holdings(own, grid, trains=program.trains)) if own else (),
        moves=tuple(collect_moves(group)),
    )


def collect_moves(group: ModuleGroup) -> Iterable[PicturedMove]:
    """Yield the moves of a module by kind, axis, direction and line, in order of start."""
    found: dict[tuple[str, str, bool, str], list[tuple[int, int, str]]] = {}
    for part in group.moves:
        move = part.move
        key = (move.kind, move.axis, move.backward, move.line)
        found.setdefault(key, []).append((part.bytes, part.sent_bytes, move.reason))
    for (kind, axis, backward, line), members in found.items():
        yield PicturedMove(
            kind=kind,
            axis=axis,
            backward=backward,
            line=os.path.basename(line),
            count=len(members),
            value_bytes=sum(size for size, _, _ in members),
            sent_bytes=sum(sent for _, sent, _ in members),
            reasons=tuple(dict.fromkeys(reason for _, _, reason in members)),
        )


def describe_inputs(program: JobProgram) -> Iterable[str]:
    """Yield the inputs of a program other than parameters, those with the same placement together."""
    groups: dict[tuple[str, str], list[int]] = {}
    for item in program.inputs:
        if item.kind != "parameter":
            groups.setdefault((item.kind, item.placement), []).append(item.bytes)
    for (kind, placement), sizes in groups.items():
        noun = kind if len(sizes) == 1 else f"{kind}s"
        yield f"{len(sizes)} {noun}, {format_decimal_bytes(sum(sizes))}: {placement}"

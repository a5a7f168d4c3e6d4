"""Compile a program for a pipeline."""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import getitem

import torch

from rankless.collectives.byte_messages import all_gather_bytes
from rankless.compiler.capture.trace_errors import offer_whole_batch
from rankless.compiler.ir.logical_program import LogicalProgram, ProgramInput, format_operator, format_value
from rankless.compiler.local_program import LocalProgram
from rankless.compiler.pipeline_parallel.data_flow import DataFlow, Need, Part
from rankless.compiler.pipeline_parallel.microbatch_lowering import (
    add_microbatch_axis,
    divide_microbatch,
    find_time_number,
    lower_microbatches,
    make_exchanges,
)
from rankless.compiler.pipeline_parallel.node_phases import Phase, ProgramPartition
from rankless.compiler.pipeline_parallel.schedules import UNIT_KINDS, describe_timeline
from rankless.compiler.pipeline_parallel.stages import PipelineOptions, place_added
from rankless.compiler.pipeline_parallel.step import PipelineRun, PipelineStep
from rankless.compiler.pipeline_parallel.step_builder import StepBuilder
from rankless.compiler.probing.operator_probe import OperatorProbe
from rankless.compiler.scheduling.gradient_buckets_and_state_storage import StateStorage
from rankless.compiler.sharding.redistribute import CollectiveRecord, count_bytes
from rankless.compiler.sharding.sharding_propagation import ShardedProgram, propagate_shardings
from rankless.parallel.mesh import Mesh, MeshAxis
from rankless.parallel.tensor_placement import Replicate, Shard, Sharding
from rankless.records.job_programs import PipelineRecord, PipelineStage


def build_pipeline_program(
    program: LogicalProgram,
    argument_shardings: Sequence[Sharding],
    mesh: Mesh,
    options: PipelineOptions,
    *,
    storage: StateStorage | None = None,
    probe: OperatorProbe | None = None,
) -> LocalProgram:
    """Return one worker's part of a program that a pipeline runs.

    Args:
        argument_shardings: The sharding of each tensor argument along all axes of the mesh.
        storage: The memory of gradients, and how states are stored. Default: new memory, and whole states.
        probe: Probes operators without a rule. None leaves them whole. With it the call is collective.
    """
    storage = storage or StateStorage()
    inner = add_microbatch_axis(mesh, 0, options.microbatches)
    # One microbatch is the whole batch. Rules may join values along an axis of size one at no cost.
    lengths = options.batch_lengths if options.microbatches > 1 else (None,) * len(argument_shardings)
    shardings = [
        add_time(sharding, rows, mesh, inner) for sharding, rows in zip(argument_shardings, lengths, strict=True)
    ]
    given = [divide_microbatch(shardings, options.exchanged, inner, number) for number in range(options.microbatches)]
    states = {name: add_time(sharding, None, mesh, inner) for name, sharding in storage.shardings.items()}
    with offer_whole_batch():
        programs = propagate_microbatches(program, given, inner, probe, states)
        options = replace(options, stages=place_added(program, options.stages))
        graphs = lower_microbatches(programs, mesh, options.stages)
        partition = ProgramPartition(graphs, programs[0], options.stages, inner.axes, storage.values)
        if any(unit.kind == "weights" for unit in options.schedule.workers[0]):
            partition.split_weights()
        builder = StepBuilder(partition, options, storage, make_exchanges(program, options.exchanged, mesh))
        step = builder.build(mesh)
    return LocalProgram(
        inputs=tuple(described for _, described in graphs[0].inputs),
        outputs=tuple(described for _, described in graphs[0].outputs),
        function=PipelineRun(step, options.transport),
        sharded=programs[0],
        storage=storage,
        collectives=(*list_sent_values(partition, builder.data_flow, options.axis), *builder.collectives),
        workers=mesh.size,
        recomputed=graphs[0].recomputed,
        pipeline=describe_pipeline(partition, options),
        time_axis=find_time_number(inner.axes),
        takers=find_takers(step, [described for _, described in graphs[0].inputs], mesh),
    )


def find_takers(step: PipelineStep, inputs: Sequence[ProgramInput], mesh: Mesh) -> Mapping[int, Sequence[int]]:
    """Return the workers that take each argument, where only some workers have read it. Collective."""
    if mesh.group is None or not any(axis.stage_workers for axis in mesh.axes):
        return {}
    taken = {number for key, number, _ in step.arguments if key in step.uses}
    own = sorted({inputs[number].index for number in taken if inputs[number].kind == "argument"})
    found: dict[int, list[int]] = {}
    for worker, data in enumerate(all_gather_bytes(array("q", own).tobytes(), mesh=mesh)):
        for argument in array("q", data):
            found.setdefault(argument, []).append(worker)
    return found


def propagate_microbatches(
    program: LogicalProgram,
    shardings: Sequence[tuple[Sharding, ...]],
    inner: Mesh,
    probe: OperatorProbe | None,
    states: Mapping[str, Sharding],
) -> list[ShardedProgram]:
    """Return the shardings of each microbatch's values. Those of equal lengths have the same.

    Args:
        probe: Probes operators without a rule, which have one answer for all microbatches.
    """
    known: dict[tuple[Sharding, ...], ShardedProgram] = {}
    for own in shardings:
        if own not in known:
            known[own] = propagate_shardings(program, own, [axis.size for axis in inner.axes], probe, states)
    return [known[own] for own in shardings]


def add_time(sharding: Sharding, lengths: Shard | None, mesh: Mesh, inner: Mesh) -> Sharding:
    """Return a sharding along the axes of one microbatch.

    Args:
        lengths: How microbatches divide the value; None if each has all of it.
    """
    others = [placement for axis, placement in zip(mesh.axes, sharding, strict=True) if axis.role != "pipeline"]
    number = find_time_number(inner.axes)
    return (*others[:number], Replicate() if lengths is None else lengths, *others[number:])


def describe_pipeline(partition: ProgramPartition, options: PipelineOptions) -> PipelineRecord:
    """Return the stages of a program as plain data."""
    stages, schedule = options.stages, options.schedule
    inputs = {described.name: node for node, described in partition.program.inputs.items()}
    parameters: list[list[int]] = [[] for _ in range(stages.count)]
    for parameter, stage in stages.owners.items():
        if parameter in inputs:
            parameters[stage].append(count_bytes(inputs[parameter]))
    operators = [stage for node, stage in stages.of.items() if node.target is not getitem]
    return PipelineRecord(
        schedule=schedule.name,
        microbatches=len(partition.graphs),
        idle_fraction=schedule.idle_fraction,
        stages=tuple(
            PipelineStage(
                workers=options.stage_workers.of[stage],
                begins=stages.borders[stage - 1] if stage else "",
                operators=operators.count(stage),
                parameters=len(parameters[stage]),
                parameter_bytes=sum(parameters[stage]),
                held_microbatches=max(map(schedule.count_held, options.stage_workers.of[stage])),
            )
            for stage in range(stages.count)
        ),
        timeline=describe_timeline(schedule),
    )


def list_sent_values(partition: ProgramPartition, data_flow: DataFlow, axis: MeshAxis) -> Iterator[CollectiveRecord]:
    """Yield what stages send to each other in a step, all microbatches of a value together."""
    for phase, number in list_parts(partition, axis.size):
        part, is_unit = Part(phase, number), phase in UNIT_KINDS
        microbatches: dict[tuple[Need, int, int], list[int]] = {}
        for microbatch in range(len(partition.graphs) if is_unit else 1):
            source = data_flow.stage_workers.find_worker(number, microbatch) if is_unit else number
            for target in range(axis.size):
                for need in data_flow.list_sent(part, target, microbatch if is_unit else None):
                    microbatches.setdefault((need, source, target), []).append(microbatch)
        for (need, source, target), numbers in microbatches.items():
            sent = numbers if is_unit else range(len(partition.graphs))
            yield describe_sent_value(partition, need, sent, f"from worker {source} to worker {target}", axis)


def list_parts(partition: ProgramPartition, workers: int) -> Iterator[tuple[Phase, int]]:
    """Yield the parts of a step of all workers: phases with numbers of workers or stages."""
    stages = range(partition.count)
    yield from (("prepare", worker) for worker in range(workers))
    yield from (("forward", stage) for stage in stages)
    yield from (("backward", stage) for stage in reversed(stages))
    yield from (("weights", stage) for stage in stages)
    yield from (("finish", worker) for worker in range(workers))


def describe_sent_value(
    partition: ProgramPartition, need: Need, microbatches: Sequence[int], reason: str, pipeline: MeshAxis
) -> CollectiveRecord:
    """Return a value that a worker sends to another, for all its microbatches, as the record of a plan."""
    node = partition.by_name[need.name]
    if "value" not in node.meta:
        logical, text, size = node.meta["source"], "number of selected rows", torch.int64.itemsize
    else:
        logical, sharding = node.meta["value"]
        # The pieces of a value that microbatches divide are all sent; what they have together is sent once.
        is_divided = isinstance(sharding[find_time_number(partition.axes)], Shard)
        numbers = microbatches if is_divided else microbatches[:1]
        size = sum(count_bytes(logical, partition.compute_shape(node, number)) for number in numbers)
        described = partition.program.inputs.get(logical)
        text = f"{format_value(logical)} of {format_operator(logical.target)}" if described is None else described.name
    return CollectiveRecord(
        kind="send",
        purpose="input",
        value=text,
        bytes=size,
        sent_bytes=size,
        line=str(logical.meta.get("line", "")),
        reason=reason,
        axis=pipeline.name,
        module=logical.meta.get("module"),
        backward=bool(logical.meta.get("backward")),
        overlapped=True,
    )

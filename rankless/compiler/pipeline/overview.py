"""Describe how a program is cut for a pipeline: its stages, and what they send to each other in a step."""

from collections.abc import Iterator, Sequence
from operator import getitem

import torch
from torch import fx

from rankless.compiler.ir.logical_program import format_operator, format_value
from rankless.compiler.pipeline.data_flow import DataFlow, Need, Part
from rankless.compiler.pipeline.microbatches import find_time_number
from rankless.compiler.pipeline.options import PipelineOptions
from rankless.compiler.pipeline.partition import Phase, ProgramPartition
from rankless.compiler.pipeline.schedules import UNIT_KINDS, describe_timeline
from rankless.compiler.sharding.redistribute import CollectiveRecord, count_bytes
from rankless.parallel.mesh import MeshAxis
from rankless.parallel.tensor_placement import Shard
from rankless.records.job_programs import PipelineRecord, PipelineStage


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
        return make_record(node.meta["source"], "number of selected rows", torch.int64.itemsize, reason, pipeline)
    logical, sharding = node.meta["value"]
    # The pieces of a value that microbatches divide are all sent; what they have together is sent once.
    is_divided = isinstance(sharding[find_time_number(partition.axes)], Shard)
    numbers = microbatches if is_divided else microbatches[:1]
    is_input = logical in partition.program.inputs
    text = (
        partition.program.inputs[logical].name
        if is_input
        else f"{format_value(logical)} of {format_operator(logical.target)}"
    )
    size = sum(count_bytes(logical, partition.compute_shape(node, number)) for number in numbers)
    return make_record(logical, text, size, reason, pipeline)


def make_record(logical: fx.Node, text: str, size: int, reason: str, pipeline: MeshAxis) -> CollectiveRecord:
    """Return the record of what a worker sends to another.

    Args:
        logical: The operator that computes it.
        text: Its name.
        size: Its bytes.
        reason: The workers that send and receive it.
        pipeline: The axis of the workers.
    """
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

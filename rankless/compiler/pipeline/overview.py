"""Describe how a program is cut for a pipeline: its stages, and what they send to each other in a step."""

from collections.abc import Iterator, Sequence
from operator import getitem

import torch
from torch import fx

from rankless.compiler.ir.logical_program import format_operator, format_value
from rankless.compiler.pipeline.data_flow import DataFlow, Need, Part
from rankless.compiler.pipeline.microbatches import find_time_number
from rankless.compiler.pipeline.options import PipelineOptions
from rankless.compiler.pipeline.partition import ProgramPartition
from rankless.compiler.pipeline.schedules import describe_timeline
from rankless.compiler.sharding.redistribute import CollectiveRecord, count_bytes
from rankless.parallel.mesh import MeshAxis
from rankless.parallel.tensor_placement import Shard
from rankless.records.job_programs import PipelineRecord, PipelineStage


def describe_pipeline(partition: ProgramPartition, options: PipelineOptions) -> PipelineRecord:
    """Return the stages of a program as plain data."""
    stages, schedule, workers = options.stages, options.schedule, options.axis.size
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
                worker=stage % workers,
                begins=stages.borders[stage - 1] if stage else "",
                operators=operators.count(stage),
                parameters=len(parameters[stage]),
                parameter_bytes=sum(parameters[stage]),
                held_microbatches=schedule.count_held(stage % workers),
            )
            for stage in range(stages.count)
        ),
        timeline=describe_timeline(schedule),
    )


def list_sent_values(partition: ProgramPartition, data_flow: DataFlow, axis: MeshAxis) -> Iterator[CollectiveRecord]:
    """Yield what stages send to each other in a step, all microbatches of a value together."""
    for part in list_parts(partition, data_flow.workers):
        for target in range(data_flow.workers):
            for need in data_flow.list_sent(part, target):
                yield describe_sent_value(partition, need, data_flow.find_worker(need.name), target, axis)


def list_parts(partition: ProgramPartition, workers: int) -> Sequence[Part]:
    """Return the parts of a step of all workers."""
    return [
        *[Part("prepare", worker) for worker in range(workers)],
        *[Part("forward", stage) for stage in range(partition.count)],
        *[Part("backward", stage) for stage in reversed(range(partition.count))],
        *[Part("weights", stage) for stage in range(partition.count)],
        *[Part("finish", worker) for worker in range(workers)],
    ]


def describe_sent_value(
    partition: ProgramPartition, need: Need, source: int, target: int, pipeline: MeshAxis
) -> CollectiveRecord:
    """Return a value that a worker sends to another, for all microbatches, as the record of a plan."""
    node = partition.by_name[need.name]
    if "value" not in node.meta:
        return describe_sent_number(node, source, target, pipeline)
    logical, sharding = node.meta["value"]
    # The pieces of a value that microbatches divide are all sent; what they have together is sent once.
    is_divided = isinstance(sharding[find_time_number(partition.axes)], Shard)
    numbers = range(len(partition.graphs) if is_divided else 1)
    is_input = logical in partition.program.inputs
    text = (
        partition.program.inputs[logical].name
        if is_input
        else f"{format_value(logical)} of {format_operator(logical.target)}"
    )
    size = sum(count_bytes(logical, partition.compute_shape(node, number)) for number in numbers)
    return make_record(logical, text, size, source, target, pipeline)


def describe_sent_number(node: fx.Node, source: int, target: int, pipeline: MeshAxis) -> CollectiveRecord:
    """Return a number of selected rows that a worker sends to another, as the record of a plan."""
    return make_record(node.meta["source"], "number of selected rows", torch.int64.itemsize, source, target, pipeline)


def make_record(
    logical: fx.Node, text: str, size: int, source: int, target: int, pipeline: MeshAxis
) -> CollectiveRecord:
    """Return the record of what a worker sends to another.

    Args:
        logical: The operator that computes it.
        text: Its name.
        size: Its bytes.
        source: The worker that sends it.
        target: The worker that receives it.
        pipeline: The axis of the workers.
    """
    return CollectiveRecord(
        kind="send",
        purpose="input",
        value=text,
        bytes=size,
        sent_bytes=size,
        line=str(logical.meta.get("line", "")),
        reason=f"from worker {source} to worker {target}",
        axis=pipeline.name,
        module=logical.meta.get("module"),
        backward=bool(logical.meta.get("backward")),
        overlapped=True,
    )

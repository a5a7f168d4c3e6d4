"""How a program is cut for a pipeline."""

from dataclasses import dataclass

from rankless.compiler.pipeline.schedules import Schedule
from rankless.compiler.pipeline.stages import Stages
from rankless.compiler.pipeline.transfers import Transport
from rankless.parallel.mesh import MeshAxis
from rankless.parallel.tensor_placement import Shard
from rankless.records.parallel_plan import PipelineSchedule


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """How a program is cut for a pipeline.

    Attributes:
        axis (MeshAxis): The workers of the pipeline.
        stages (Stages): The stages of the program.
        schedule_name (PipelineSchedule): The name of the schedule.
        schedule (Schedule): The order of units.
        microbatches (int): Their number.
        batch_lengths (tuple[Shard | None, ...]): How each tensor argument is divided into microbatches, if it is.
        divided (frozenset[str]): The parameters that only the worker of their stage has.
        transport (Transport): Moves values between stages.
    """

    axis: MeshAxis
    stages: Stages
    schedule_name: PipelineSchedule
    schedule: Schedule
    microbatches: int
    batch_lengths: tuple[Shard | None, ...]
    divided: frozenset[str]
    transport: Transport

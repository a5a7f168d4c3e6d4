"""How a program is cut for a pipeline."""

from dataclasses import dataclass

from rankless.compiler.pipeline_parallel.schedules import Schedule, StageWorkers
from rankless.compiler.pipeline_parallel.stages import Stages
from rankless.compiler.pipeline_parallel.transfers import Transport
from rankless.parallel.mesh import MeshAxis
from rankless.parallel.tensor_placement import Shard


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """How a program is cut for a pipeline.

    Attributes:
        axis (MeshAxis): The workers of the pipeline.
        stages (Stages): The stages of the program.
        stage_workers (StageWorkers): Their workers.
        schedule (Schedule): The order of units.
        microbatches (int): Their number.
        batch_lengths (tuple[Shard | None, ...]): How each tensor argument is divided into microbatches, if it is.
        transport (Transport): Moves values between stages.
        exchanged (tuple[Shard | None, ...]): How the workers along the axis `expert` hold each argument that
            microbatches divide; see Note [arguments of microbatches].
    """

    axis: MeshAxis
    stages: Stages
    stage_workers: StageWorkers
    schedule: Schedule
    microbatches: int
    batch_lengths: tuple[Shard | None, ...]
    transport: Transport
    exchanged: tuple[Shard | None, ...] = ()

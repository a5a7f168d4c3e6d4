"""The parallel plan: what is divided between the workers of a run, and how, as data that can be saved and read."""

from typing import Annotated, Literal

import msgspec

Recompute = Literal["blocks"] | float
"""What is computed again for gradients: all blocks of a model, or the first ones with a fraction of their memory."""
ZeroLevel = Literal["optimizer", "gradients", "parameters"]
"""The training state that is sharded across workers: that of optimizers, also gradients, or also parameters."""
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
"""The order in which the stages of a pipeline compute microbatches; see `compiler.pipeline_parallel.schedules`."""
PLAN_FORMAT = 2
ZERO_LEVELS: tuple[ZeroLevel, ...] = ("optimizer", "gradients", "parameters")


class PlannedAxis(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One axis of the mesh."""

    name: str
    role: str
    size: int
    stage_workers: tuple[tuple[int, ...], ...] = ()
    """The workers of each stage along an axis `pipeline` with heterogeneous workers; none if stages have one each."""


class StateDivision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a tensor is divided along one axis of the mesh, after other divisions of it.

    If an earlier one has the same dim, what that leaves on a worker is divided evenly, or is all on the worker that has
    all rows.
    """

    axis: str
    dim: int
    lengths: tuple[int, ...]
    """The rows of the whole dim that each worker along the axis holds, of each block."""
    blocks: int = 1
    """The number of equal parts of the dim that are divided alike, such as 3 for queries, keys and values."""


class StatePlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a parameter or a buffer is held, with what belongs to it.

    Divisions are in the order in which they divide a tensor. Without one, every worker holds the whole. What the value
    has, the gradient begins with, and what the gradient has, the optimizer state.
    """

    shape: tuple[int, ...]
    dtype: str
    value: tuple[StateDivision, ...] = ()
    gradient: tuple[StateDivision, ...] = ()
    optimizer_state: tuple[StateDivision, ...] = ()
    offloaded: bool = False
    """Whether the shards lie in the memory of the host, and the optimizer steps there."""


class PipelinePlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a job is cut along the axis `pipeline`."""

    schedule: PipelineSchedule
    microbatches: int
    """The microbatches of a batch with enough samples."""
    stages: dict[str, int] = {}
    """The stage of each parameter, tied ones under their first name. None for a job without an optimizer, which has the
    stages of the jobs that train its models."""


class JobPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one job is divided."""

    arguments: dict[str, int | None] = {}
    """The dim of each tensor argument that the axes `data` and `expert` divide, and the microbatches of a pipeline;
    None for a whole one."""
    positions: dict[str, int | None] = {}
    """The dim of each tensor argument that the axis `sequence` divides, on a mesh with this axis."""
    states: dict[str, StatePlan]
    """Its parameters and buffers by name, such as "model.head.weight"; tied ones under their first name."""
    recompute: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """How much of what the model's blocks compute is computed again for gradients, from 0 to 1."""
    sequence_parallel: bool = False
    """Whether the axis `tensor` divides activations between layers too."""
    pipeline: PipelinePlan | None = None
    """Its stages, on a mesh with the axis `pipeline`."""

    @property
    def divides_states(self) -> bool:
        """Whether a worker holds less than all of the job's state."""
        return any(state.optimizer_state for state in self.states.values())


class PlanVersion(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan of any format says of itself. It is read first."""

    format: int
    rankless: str


class ParallelPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The plan of a run, and what it was made for."""

    format: int = PLAN_FORMAT
    rankless: str
    """The version that made it."""
    program: str
    """The script or module."""
    source_sha256: str
    """The digest of the program's own source files."""
    axes: tuple[PlannedAxis, ...]
    jobs: dict[str, JobPlan]
    """By name of the job."""

    @property
    def workers(self) -> int:
        """The number of workers."""
        count = 1
        for axis in self.axes:
            count *= axis.size
        return count

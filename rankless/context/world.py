"""What the runtime hands to the views, so that they never ask who they are."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from rankless.context.loader_passes import LoaderPasses
from rankless.context.model_changes import ModelChanges
from rankless.context.observers import CallInspector, JobRecorder, ProgramObserver
from rankless.context.progress_meter import ProgressMeter
from rankless.context.step_limit import StepLimit
from rankless.parallel.mesh import Mesh
from rankless.records.events import AnyRecord


class OnceState:
    """Whether rank 0 is alone, inside `rankless.once`: then nothing may wait for the others."""

    def __init__(self) -> None:
        self.doing: str | None = None
        """The name of what rank 0 does alone."""


@dataclass(frozen=True, kw_only=True)
class World:
    """The mesh, and the ways up: a notice said once, a record sent to whoever observes.

    `recorder` writes job results down for `rankless verify`; None but in its runs. The runtime makes it,
    and calls its `finish` at leave. `perturbation_seed` is set in `verify`'s noise-floor run only.
    """

    mesh: Mesh
    notify: Callable[[str], None]
    send_record: Callable[[AnyRecord], None]
    recorder: JobRecorder | None = None
    perturbation_seed: int | None = None
    dtype: torch.dtype | None = None
    """What jobs compute in, whatever the script says; None leaves it to the script."""
    model_changes: ModelChanges = field(default_factory=ModelChanges)
    """Knows which models were changed outside jobs."""
    limit: StepLimit | None = None
    """Told of training steps; ends the script after the last one wanted."""
    programs: ProgramObserver | None = None
    """Takes the programs of jobs, for `rankless plan` and `rankless verify`; rank 0 only."""
    inspector: CallInspector | None = None
    """Takes every value of one job call; None but where `verify` looks for the first that differs."""
    meter: ProgressMeter | None = None
    """Told of batches by loaders and of steps by train jobs; None where nobody watches."""
    passes: LoaderPasses = field(default_factory=LoaderPasses)
    """Told by loaders of batches and ends of passes, for jobs that gather several calls into a step."""
    once: OnceState = field(default_factory=OnceState)
    """Whether rank 0 is inside `rankless.once`."""


WorldSource = Callable[[], World]
"""Called at the first use, so that a job may be defined before the world is joined."""

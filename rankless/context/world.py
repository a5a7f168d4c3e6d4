"""The world that the runtime passes to jobs and loaders, so that they never look up rank or process group.

Note [operations]: in some runs the others may continue without a worker that was killed. What workers
do together is therefore an operation: a job's call, a pass over a loader, `once`, `save`. It changes nothing that
lasts, and ends with a barrier. A worker that has passed the barrier knows that all have entered it. After a loss the
others compare how many operations they have passed. The largest number counts for all of them. A worker that has not
passed that last one was in its barrier, and has its result. All begin the next operation again, in a new world. Until
then a worker may know the new world or not: what it does alone, such as reading a batch, it does in that of the last
operation.
"""

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from rankless.context.accumulation_passes import LoaderPasses
from rankless.context.all_or_nothing_operations import Operations, Recovery
from rankless.context.changes_outside_jobs import ModelChangeDetector, OptimizerChanges
from rankless.context.extension_participants import JointEvents
from rankless.context.redundant_step_calls import LeftoverCalls
from rankless.context.step_events import StepEvents
from rankless.errors import RanklessError
from rankless.ownership.partitioned_tensor import run_directly
from rankless.ownership.shard_layout import choose_copy_holders
from rankless.ownership.sharded_state_owner import ShardedStateOwner
from rankless.ownership.state_owner import StateOwner
from rankless.parallel.mesh import Mesh, list_state_axes
from rankless.records.events import AnyRecord
from rankless.records.parallel_plan import ParallelPlan, PlannedAxis

Result = TypeVar("Result")


class CompiledProgramRecorder(Protocol):
    """Receives the program of each job, for `rankless plan`. A protocol, so that jobs import no recorder."""

    def record(self, job: Any, local: Any) -> None:
        """Record the program of one job."""
        ...

    def run(self, job: Any, bound: Any, values: Sequence[Tensor], sizes: Sequence[int]) -> Sequence[Tensor]:
        """Run a program of a job, and measure the memory that it takes in its first call."""
        ...

    def write(self, fact: Any) -> None:
        """Record a step of a script in the logical view."""
        ...

    def finish(self, known: Iterable[Any]) -> None:
        """Record which jobs exist, and close."""
        ...


class CallInspector(Protocol):
    """Records every value of one job call, so that `rankless verify` can name the first value that differs."""

    def count_call(self, job: str) -> bool:
        """Count a call of a job, and return whether it is the call to inspect."""
        ...

    def instrument(self, program: Any, world: Any) -> Callable[[Sequence[Tensor], Sequence[int]], Sequence[Tensor]]:
        """Return a placed program that also records its values."""
        ...

    def run_alongside(self, job: Any, world: Any, arguments: Any) -> None:
        """Record the values of the call on one worker, without side effects."""
        ...

    def record_plain(self, job: Any, result: Any) -> None:
        """Record the results of the plain call on one worker."""
        ...


class HiddenGradients:
    """The parameters whose gradients a script does not find in `.grad`, because some job divides them between workers.

    Other jobs may train them too. They are hidden on one device as well, where nothing is divided, so that a script
    behaves the same there.

    Example:
        >>> import torch
        >>> hidden = HiddenGradients()
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> hidden.add([weight])
        >>> [item is weight for item in hidden.select([torch.ones(2), weight])]
        [True]
    """

    def __init__(self) -> None:
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Hide the gradients of parameters from now on."""
        for parameter in parameters:
            self._known[parameter] = True

    def select(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return those of some parameters whose gradients are hidden."""
        return [item for item in parameters if item in self._known] if len(self._known) else []


class OnceState:
    """Whether rank 0 is alone inside `rankless.once`. Then nothing may wait for other ranks."""

    def __init__(self) -> None:
        self.call: str | None = None
        """The call that rank 0 is in, such as "rankless.once(download)"."""


@dataclass(frozen=True, kw_only=True)
class StartedWorkers:
    """The workers with which the run began. Participants and records know them by these numbers."""

    own: int
    """The number of this process."""
    count: int
    lost: tuple[int, ...] = ()
    """Those that were killed while the others went on."""
    round: int = 0
    """How often those that are left have formed a group anew."""
    kinds: tuple[tuple[int, ...], ...] = ()
    """The workers of each kind, lost ones included, where some are heterogeneous."""
    axes: tuple[PlannedAxis, ...] = ()
    """The axes of the mesh, if it has others than `data` or the run was given a plan."""
    hosts: tuple[int, ...] = ()
    """The host of each, lost ones included, if workers keep copies of others' shards."""
    present_hosts: tuple[int, ...] = ()
    """The same of each worker that is left, by its rank now."""

    @property
    def has_copies(self) -> bool:
        """Whether what only some workers have of states is on others, too, so that one of them may be lost."""
        return bool(self.kinds or self.present_hosts or self.axes)

    @staticmethod
    def of(workers: Mesh) -> "StartedWorkers":
        """Return the numbers of all workers of a run that has lost none: their ranks."""
        kinds = next((axis.stage_workers for axis in workers.axes if axis.stage_workers), ())
        return StartedWorkers(own=workers.rank, count=workers.size, kinds=kinds)


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What the command line asks of jobs."""

    dtype: torch.dtype | None = None
    """The dtype in which jobs compute, whatever the script says. None leaves it to the script."""
    plan: ParallelPlan | None = None
    """The plan of the run; None lets each job make its own."""
    perturbation_seed: int | None = None
    """The seed of the perturbation, in the run with which `rankless verify` measures rounding noise."""
    programs: CompiledProgramRecorder | None = None
    """Receives the programs of jobs, for `rankless plan` and `rankless verify`. Rank 0 only."""
    inspector: CallInspector | None = None
    """Records every value of one job call, in runs in which `rankless verify` finds the first difference."""


@dataclass(frozen=True, kw_only=True)
class ScriptState:
    """What a script does beside its jobs."""

    model_changes: ModelChangeDetector = field(default_factory=ModelChangeDetector)
    """Knows which models the script has changed outside jobs."""
    optimizer_changes: OptimizerChanges = field(default_factory=OptimizerChanges)
    """Knows which optimizers the script has changed outside jobs."""
    leftovers: LeftoverCalls = field(default_factory=LeftoverCalls)
    """Finds calls of a plain training loop beside jobs."""
    hidden_gradients: HiddenGradients = field(default_factory=HiddenGradients)
    """Knows which parameters have no `.grad` for the script."""
    once: OnceState = field(default_factory=OnceState)
    """Whether rank 0 is inside `rankless.once`."""


@dataclass(frozen=True, kw_only=True)
class PipelineStages:
    """Where the parameters of pipelines are."""

    stages: MutableMapping[Tensor, int] = field(default_factory=WeakIdKeyDictionary)
    """The stage to which a parameter belongs, by the parameter."""
    owners: MutableMapping[Tensor, int] = field(default_factory=WeakIdKeyDictionary)
    """The worker along the axis `pipeline` that has a parameter, by the parameter."""


@dataclass(frozen=True, kw_only=True)
class World:
    """The mesh of a process, the channels to the user and to observers, and the state that jobs and loaders share."""

    mesh: Mesh
    notify: Callable[[str], None]
    """Shows the user a notice, once."""
    send_record: Callable[[AnyRecord], None]
    """Sends a record to the observers of the run."""
    events: StepEvents = field(default_factory=StepEvents)
    """Tells the participants of the run what jobs and loaders do."""
    settings: RunSettings = field(default_factory=RunSettings)
    """What the command line asks of jobs."""
    script: ScriptState = field(default_factory=ScriptState)
    """What the script does beside jobs."""
    passes: LoaderPasses = field(default_factory=LoaderPasses)
    """Receives batches and ends of passes from loaders, for jobs that accumulate several calls into a step."""
    pipeline: PipelineStages = field(default_factory=PipelineStages)
    """Where the parameters of pipelines are."""
    joint: JointEvents = field(default_factory=JointEvents)
    """Tells the participants of extensions that all ranks have what jobs do."""
    started: StartedWorkers | None = None
    """The workers with which the run began, where it may go on without some of them."""
    operations: Operations = field(default_factory=Operations)
    """Makes exceptions of one rank those of all."""
    recovery: "Recovery[World] | None" = None
    """Goes on without lost workers. None: a lost worker ends the run."""

    @property
    def workers(self) -> Mesh:
        """The mesh of all workers that run the script. Jobs and loaders use `mesh`."""
        return self.joint.workers or self.mesh

    @property
    def current(self) -> "World":
        """The world of the workers that are left. Others may have been lost since this one was made."""
        return self if self.recovery is None else self.recovery.world

    @property
    def of_last_operation(self) -> "World":
        """The world of the last operation of all workers: the same on all, also while only some know of a loss."""
        return self if self.recovery is None else self.recovery.world_of_last_operation

    @property
    def numbering(self) -> StartedWorkers:
        """The workers by the numbers with which the run began."""
        return self.started or StartedWorkers.of(self.workers)

    def run_for_all(
        self,
        attempt: "Callable[[World], Result]",
        *,
        commits: Callable[[], bool] = lambda: False,
        generators: Callable[[], Iterable[torch.Generator]] = tuple,
    ) -> "Result":
        """Return what an operation of all workers returns, which counts for all of them or for none.

        Args:
            attempt: Makes the operation in a world. It changes nothing that lasts, because it is called again if a
                worker is lost.
            commits: Whether a step that participants count follows the operation.
            generators: Returns the generators that it draws from besides PyTorch's own, in the same order on all ranks.
        """
        recovery = self.recovery

        def run() -> "Result":
            return attempt(self) if recovery is None else recovery.run(attempt, commits=commits)

        return self.operations.run(lambda: self.current.mesh, run, generators=generators)

    @cached_property
    def owner(self) -> StateOwner:
        """Holds parameters, gradients and optimizer state, of which each worker may have only pieces."""
        own = self.joint.make_owner()
        if own is not None:
            return own
        owner, hosts = StateOwner(), self.numbering.present_hosts
        for axis in reversed(list_state_axes(self.mesh) if self.mesh.size > 1 else ()):
            # Copies are along the innermost axis. What outer ones divide, other workers along it have too.
            along = self.mesh.list_ranks_along(axis) if hosts and type(owner) is StateOwner else ()
            owner = ShardedStateOwner(
                axis,
                self._require_all_workers,
                shares_values=axis.role == "data",  # only along it do workers read each other's parameters
                within=owner,
                run=run_directly if self.recovery is None else self.run_on_states,
                copy_holders=choose_copy_holders([hosts[rank] for rank in along]),
            )
        return owner

    @property
    def present_owner(self) -> StateOwner:
        """The owner that has the states now: that of an earlier world until those of a lost worker are taken over."""
        return self.owner if self.recovery is None else self.recovery.owner

    def run_on_states(self, attempt: "Callable[[], Result]", *, is_in_step: bool = False) -> "Result":
        """Return what workers compute together of states that they divide: an operation if one of them may be lost.

        Args:
            attempt: Computes it, and changes nothing that lasts.
            is_in_step: Whether it is a part of a step, whose gradients all workers have.
        """
        if self.recovery is None or not self.numbering.has_copies:
            return attempt()
        return self.recovery.run(lambda _: attempt(), is_in_step=is_in_step)

    def require_not_in_once(
        self, operation: str, *, fix: str = "do it before, outside of once, and pass the result"
    ) -> None:
        """Raise RanklessError if rank 0 is alone inside `rankless.once`, where it must not wait for other ranks."""
        if self.script.once.call is not None and self.workers.size > 1:
            raise RanklessError(
                expected=f"inside {self.script.once.call} only operations of rank 0 alone",
                found=f"{operation}, in which all ranks must take part",
                fix=fix,
            )

    def _require_all_workers(self, operation: str) -> None:
        """Raise an error if not all ranks are about to gather something for the script."""
        self.require_not_in_once(operation)
        self.current.mesh.check_sync_point(operation)


WorldSource = Callable[[], World]
"""Returns the world. A job calls it at its first use, so a script may define jobs before the process joins."""

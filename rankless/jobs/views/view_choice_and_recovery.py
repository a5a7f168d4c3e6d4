"""Choose the view of a job, and run the job's calls in it.

The view is chosen at the first call, or before it if `rankless.load` divides the job's states. A call is an operation
of all workers: they repeat it in a new view, without a worker that is lost meanwhile.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from torch.nn.parameter import is_lazy

from rankless.context.world import World
from rankless.data.logical_tensor import LogicalTensor, divide_again
from rankless.deferred_models.build_and_materialize import find_deferred, materialize
from rankless.errors import CaptureError, LostWorkerError, RanklessError
from rankless.jobs.arguments import FlattenedArguments
from rankless.jobs.dtype_override import cast_job
from rankless.jobs.job_definition import CallResult, JobDefinition
from rankless.jobs.views.call_error_explanations import explain_failure
from rankless.jobs.views.captured import ConsistentView
from rankless.jobs.views.logical import LogicalJobView, can_run_logically
from rankless.jobs.views.mirrored import MirroredView
from rankless.jobs.views.one_device import PlainView
from rankless.jobs.views.uncaptured import UncapturedView
from rankless.ownership.modules_with_states_elsewhere import list_extension_modules
from rankless.parallel.default_generator import restore_generators, save_generators


class JobView(Protocol):
    """Runs the calls of a job: one of this package's views, or that of an extension."""

    def run(self, arguments: FlattenedArguments) -> CallResult:
        """Return the job's result. A train job also sets its parameters' gradients."""
        ...


def start_view(job: JobDefinition, world: World) -> JobView:
    """Return the view that runs a job's calls in this world. The job's models then have values.

    Models of `rankless.deferred()` whose states the job divides are computed and divided tensor by tensor.
    """
    view = None
    if world.settings.dtype is None and divides_states(job, world) and find_deferred(job.modules.values()):
        view = ConsistentView(job, world)
        view.divide_states()
    materialize(job.modules.values())
    if world.settings.dtype is not None:
        cast_job(job, world.settings.dtype)
    return view or make_view(job, world)


def make_view(job: JobDefinition, world: World) -> JobView:
    """Return the view that a job has in this world."""
    added: JobView | None = world.joint.make_view(job, world)
    if added is not None:
        return added
    if job.view == "mirrored":
        return MirroredView(job, world)
    # Values are computed again in a program. The run that `verify` compares with is the plain script.
    recomputes = job.recomputed_fraction > 0 and not world.events.compares_values
    if world.mesh.size == 1 and not recomputes:
        return PlainView(job, world)
    return ConsistentView(job, world) if job.captured else UncapturedView(job, world)


def divides_states(job: JobDefinition, world: World) -> bool:
    """Return whether a job can divide states between workers before its first call."""
    is_asked = job.step_options.zero is not None or world.settings.plan is not None
    is_captured = job.view == "consistent" and job.captured and world.mesh.size > 1
    return is_asked and is_captured and not any(is_lazy(item) for item in job.parameters())


class WorldView:
    """The view of a job in the world of the workers that are left."""

    def __init__(self, job: JobDefinition) -> None:
        self._job = job
        self.view: JobView | None = None
        """The view, once it was needed."""
        self._world: World | None = None

    def find(self, world: World) -> JobView:
        """Return the view for a world, which is made anew if a worker was lost since the last call.

        Raises LostWorkerError if the job cannot continue in it.
        """
        before = self.view
        if self.view is not None and world.recovery is not None and self._world is not world:
            self._require_movable(world)
            self.view = None
            for optimizer in self._job.optimizers:
                world.script.optimizer_changes.forget(optimizer)
        self._world = world
        self.view = self.view or start_view(self._job, world)
        if self.view is not before and isinstance(before, ConsistentView) and isinstance(self.view, ConsistentView):
            self.view.take_over(before)
        return self.view

    def run(self, world: World, arguments: FlattenedArguments) -> Callable[[], CallResult]:
        """Run a call as far as it changes nothing that lasts.

        Returns:
            A function that returns the result of the call. For a train job it also sets its parameters' gradients.
        """
        view = self.find(world)
        if not isinstance(view, ConsistentView):
            world.operations.begin(world.mesh)
            return functools.partial(self._run_once, view, divide_arguments(arguments, world), world)
        try:
            return self._run_for_all(view, world, arguments)
        except CaptureError as error:
            now = world.current  # others may have been lost meanwhile
            if not can_run_logically(self._job, now):
                raise
            self._world, self.view = now, LogicalJobView(self._job, now, error)
            return functools.partial(self._run_once, self.view, divide_arguments(arguments, now), now)

    def _run_for_all(
        self, view: ConsistentView, world: World, arguments: FlattenedArguments
    ) -> Callable[[], CallResult]:
        """Run a call's program as an operation of all workers."""
        if world.recovery is None:
            return world.run_for_all(
                lambda _: self._compute(view, arguments, world), generators=lambda: view.generators
            )
        view.joint.share()  # operations of their own
        states, is_first = save_generators(view.generators), True

        def attempt(current: World) -> Callable[[], CallResult]:
            nonlocal is_first
            if not is_first:
                restore_generators(states)
            is_first = False
            divided, view = divide_arguments(arguments, current), self.find(current)
            if isinstance(view, ConsistentView):
                return self._compute(view, divided, current)
            return functools.partial(view.run, divided)  # this worker is alone

        counts = world.joint.counts_steps
        return world.run_for_all(attempt, commits=lambda: self._job.trains and counts)

    def _run_once(self, view: JobView, arguments: FlattenedArguments, world: World) -> CallResult:
        """Run a call that cannot be made again without a lost worker. Raises LostWorkerError if one is lost in it."""
        try:
            return view.run(arguments)
        except Exception as error:
            if world.recovery is not None and world.mesh.size > 1 and world.recovery.has_lost(error):
                self._require_movable(world, is_inside=True)
            raise

    def _compute(self, view: ConsistentView, arguments: FlattenedArguments, world: World) -> Callable[[], CallResult]:
        """Run a call's program. What this rank raises is what all ranks raise."""
        try:
            return view.compute(arguments)
        except RanklessError:
            raise
        except Exception as error:  # an operator, or PyTorch's tracer
            failure = explain_failure(self._job, world, error)
            raise failure from failure.__cause__

    def prepare_next_call(self, world: World) -> None:
        """Tell the job's participants that its step is made."""
        if isinstance(self.view, ConsistentView) and self._world is world:
            self.view.joint.prepare_next_call()

    def _require_movable(self, world: World, *, is_inside: bool = False) -> None:
        """Raise LostWorkerError if a worker was lost that had a part of what the job needs.

        Args:
            world: The workers.
            is_inside: Whether a call is interrupted that cannot be made again.
        """
        job = self._job
        found = None
        if is_inside and isinstance(self.view, LogicalJobView):
            found = "one that is no program: each worker had a part of the call"
        fix, zero = "start the run again from a checkpoint", job.step_options.zero
        if zero is not None and not world.numbering.hosts:
            found, fix = f"zero={zero!r}: it had a part of the states", f"{fix}, with --copies 1"
        elif job.accumulates and list_extension_modules(job.modules.values()):
            found = f"accumulate={job.step_options.accumulate} and tables: it had gradients of rows of earlier calls"
        elif job.view != "consistent":
            found = 'view="mirrored"' if job.view == "mirrored" else "capture=False"
        if found is not None:
            raise LostWorkerError(
                expected=f"a job that can continue without a lost worker, as {job.name!r}",
                found=found,
                fix=fix,
                where=job.line,
            )


def divide_arguments(arguments: FlattenedArguments, world: World) -> FlattenedArguments:
    """Return the arguments of a call as the workers that are left divide them."""
    if world.recovery is None or all(
        not isinstance(tensor, LogicalTensor) or tensor.mesh is world.mesh for tensor in arguments.tensors
    ):
        return arguments
    tensors = [
        divide_again(each, world.mesh) if isinstance(each, LogicalTensor) else each for each in arguments.tensors
    ]
    return replace(arguments, tensors=tuple(tensors))

"""A call of a job as an operation of all workers, which others make again without a worker that is lost meanwhile."""

import functools
from collections.abc import Callable
from dataclasses import replace

from rankless.context.generator_states import restore_generators, save_generators
from rankless.context.world import World
from rankless.data.logical_tensor import LogicalTensor, divide_again
from rankless.errors import LostWorkerError, RanklessError
from rankless.jobs.arguments import FlattenedArguments
from rankless.jobs.definition import CallResult, JobDefinition
from rankless.jobs.views.call_failures import explain_failure
from rankless.jobs.views.consistent import ConsistentView
from rankless.jobs.views.view_start import JobView, start_view
from rankless.ownership.extension_modules import list_extension_modules


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
        if self.view is not None and world.recovery is not None and self._world is not world:
            self._require_movable(world)
            self.view = None
        self._world = world
        self.view = self.view or start_view(self._job, world)
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
                self._require_movable(world)
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

    def _require_movable(self, world: World) -> None:
        """Raise LostWorkerError if a worker was lost that had a part of what the job needs."""
        job = self._job
        found = None
        if job.step_options.zero is not None:
            found = f"zero={job.step_options.zero!r}: it had a part of the states"
        elif job.accumulates and list_extension_modules(job.modules.values()):
            found = f"accumulate={job.step_options.accumulate} and tables: it had gradients of rows of earlier calls"
        elif job.accumulates and world.numbering.kinds:
            found = f"accumulate={job.step_options.accumulate} beside heterogeneous workers: it had sums of gradients"
        elif job.view != "consistent":
            found = 'view="mirrored"' if job.view == "mirrored" else "capture=False"
        if found is not None:
            raise LostWorkerError(
                expected=f"a job that can continue without a lost worker, as {job.name!r}",
                found=found,
                fix="start the run again from a checkpoint",
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

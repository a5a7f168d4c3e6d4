"""The logical view of a job that cannot be one program: each rank runs its function on divided batches.

Each PyTorch function is lowered by itself; see `rankless.logical_view`. Models, gradients and results are whole and
equal on all ranks, as in a script without a job.
"""

from dataclasses import replace

from rankless.compiler.capture.result_structure import map_result
from rankless.compiler.capture.trace_to_program import named_tensors
from rankless.context.world import World
from rankless.errors import CaptureError
from rankless.jobs.arguments import FlattenedArguments
from rankless.jobs.call_agreement import CallSync, RandomStates, format_call
from rankless.jobs.job_definition import CallResult, JobDefinition
from rankless.jobs.model_sync_between_ranks import require_usable_models
from rankless.jobs.views.one_device import PlainView
from rankless.logical_view.function_handlers import take_whole
from rankless.logical_view.gradients import LogicalBackward
from rankless.logical_view.tensor import LogicalView
from rankless.plain_script.loaders import convert_tensor


class LogicalJobView:
    """Runs one job on every rank of a mesh, with the rank's rows of the batch.

    Args:
        job: The job.
        world: The ranks; see `can_run_logically`.
        reason: Why the job is not one program.
    """

    def __init__(self, job: JobDefinition, world: World, reason: CaptureError) -> None:
        self._job = job
        self._world = world
        self._sync = CallSync(job, world)
        self._plain = PlainView(job, world, warns=False)
        self._random_states = RandomStates(with_python=True)
        self._view = LogicalView(world.mesh, self._notify)
        self._backward = LogicalBackward(self._view)
        require_usable_models(job, world)
        self._pending: list[str] | None = [
            f"{reason.where or job.line}: job {job.name!r} cannot be one program ({reason.found}), so its functions "
            "run one by one on divided batches; capture=False runs it on the whole batch on every rank instead"
        ]
        """What the user hears after the first call, unless one device refuses the job too; None once it has ended."""

    def run(self, arguments: FlattenedArguments) -> CallResult:
        """Return the job's result, the same on every rank. A train job also sets its parameters' gradients.

        Raises:
            RanksDiverged: Ranks make other calls, or have other values.
        """
        self._sync.check(
            format_call(self._job.name, self._sync.calls + 1, arguments),
            arguments=arguments,
            random_states=self._random_states,
        )
        owner = self._world.owner
        owner.begin_call()
        tensors = tuple(convert_tensor(tensor, self._view) for tensor in arguments.tensors)
        try:
            with self._backward.install():
                outcome = self._plain.run(replace(arguments, tensors=tensors))
                outcome = replace(outcome, result=map_result(take_whole, outcome.result), loss=take_whole(outcome.loss))
        except CaptureError:
            self._pending = None
            raise
        finally:
            pending, self._pending = self._pending, None
            for text in pending or ():
                self._world.notify(text)
        self._world.mesh.check_sync_point_again()
        owner.begin_call()  # the job may have changed parameters of which this worker has a shard
        states = [tensor for _, tensor in sorted(named_tensors(self._job.modules).items())]
        self._sync.record_states(states, states)
        return outcome

    def _notify(self, text: str) -> None:
        if self._pending is None:
            self._world.notify(text)
        else:
            self._pending.append(text)


def can_run_logically(job: JobDefinition, world: World) -> bool:
    """Return whether a job that cannot be one program can run in the logical view: nothing but batches is divided."""
    (axis, *others) = world.mesh.axes
    is_divided = job.step_options.zero is not None or world.settings.plan is not None or job.accumulates
    is_plain = axis.size > 1 and axis.role == "data" and not others and not axis.stage_workers
    return is_plain and not is_divided and not job.draws_by_counter and job.recomputed_fraction == 0

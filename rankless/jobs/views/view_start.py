"""The view of a job, made at its first call, or when `rankless.load` divides its states before."""

from typing import Protocol

from torch.nn.parameter import is_lazy

from rankless.context.world import World
from rankless.deferred_models.building import find_deferred, materialize
from rankless.jobs.arguments import FlattenedArguments
from rankless.jobs.definition import CallResult, JobDefinition
from rankless.jobs.dtype_override import cast_job
from rankless.jobs.views.consistent import ConsistentView
from rankless.jobs.views.mirrored import MirroredView
from rankless.jobs.views.one_device import PlainView
from rankless.jobs.views.uncaptured import WholeBatchView


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
    return ConsistentView(job, world) if job.captured else WholeBatchView(job, world)


def divides_states(job: JobDefinition, world: World) -> bool:
    """Return whether a job can divide states between workers before its first call."""
    is_asked = job.step_options.zero is not None or world.settings.plan is not None
    is_captured = job.view == "consistent" and job.captured and world.mesh.size > 1
    return is_asked and is_captured and not any(is_lazy(item) for item in job.parameters())

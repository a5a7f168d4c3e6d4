"""Jobs: functions on whole batches that the system runs on one device or on many.

On one device a job runs as the plain script would. On a mesh it is captured, placed, lowered and run (see `program`).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rankless.errors import PlanError, RanklessError
from rankless.views.arguments import taken_apart
from rankless.views.batch_dims import BatchDims
from rankless.views.consistent import Consistent
from rankless.views.definition import JobDefinition
from rankless.views.once import require_company
from rankless.views.plain import Plain
from rankless.views.precision import cast_arguments, cast_job
from rankless.views.world import WorldSource

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]


class Job(Generic[Parameters, Result]):
    """A function that trains (if it has an optimizer) or predicts on whole batches.

    Calling it gives the whole result on every rank: tensors without gradient, plain values as they are.
    """

    def __init__(self, definition: JobDefinition, world: WorldSource) -> None:
        functools.update_wrapper(self, definition.function)
        self.definition = definition
        self._world = world
        self._view: Plain | Consistent | None = None
        self._batch_dims: BatchDims | None = None

    def mark(self, batch_dims: Mapping[str, int | None]) -> None:
        """Say which dim of which argument holds the batch; None for one that is not batch."""
        self._batch_dims = BatchDims(self.definition.function, batch_dims)

    @property
    def called(self) -> bool:
        """Whether it has been called in this process."""
        return self._view is not None

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        """Run the job on a whole batch; a train job also makes its optimizer's step.

        Raises `CaptureError` on a mesh if the job cannot be one program.
        """
        world, job = self._world(), self.definition
        require_company(world, f"job {job.name!r}")
        if self._view is None:
            if world.dtype is not None:
                cast_job(job, world.dtype)
            self._view = Plain(job, world) if world.mesh.size == 1 else Consistent(job, world)
        if world.recorder is not None:
            for name, module in job.modules.items():
                world.recorder.register(name, module)
        arguments = taken_apart(args, kwargs, job.device(world.mesh.device))
        if self._batch_dims is not None:
            arguments = self._batch_dims.marked(arguments)
        if world.dtype is not None:
            arguments = cast_arguments(arguments, world.dtype)
        try:
            result: Result = self._view.run(arguments)
        except RanklessError as error:
            # The message has the script's line; the frames below this one are ours and PyTorch's.
            raise error.with_traceback(None) from error.__cause__
        if world.recorder is not None:
            world.recorder.record_call(job=job.name, line=job.line, results=result)
            if job.trains:
                world.recorder.record_step(job=job.name, model=job.modules)
        if world.meter is not None and job.trains:
            world.meter.trained(job=job.name, loss=lambda: float(loss_of(result)))
        if world.limit is not None and job.trains:
            world.limit.step_made()
        return result

    def __get__(self, instance: object, owner: type) -> Self:
        """The job itself from its class; from an instance it could not take its `self`, and that is refused."""
        if instance is None:
            return self
        name = self.definition.name
        raise PlanError(
            expected="a job made of a function, or of a method that has its object",
            found=f"@rankless.job on the method {owner.__name__}.{name}",
            fix=f"leave the method plain, and in __init__: self.{name} = rankless.job(model=…)(self.{name})",
            where=self.definition.line,
        )


def make_job(
    function: Callable[Parameters, Result],
    *,
    model: Models,
    optimizer: Optimizer | None,
    view: str,
    world: WorldSource,
    check_every: int | None = None,
) -> Job[Parameters, Result]:
    """A job from a function; see `rankless.job` for what the arguments mean."""
    if view != "consistent":
        raise PlanError(
            expected='view="consistent"',
            found=f"view={view!r}",
            fix="leave view= away; the mirrored view is not part of this release",
        )
    if check_every is not None and (not isinstance(check_every, int) or check_every < 1):
        raise PlanError(expected="check_every= as a number of calls, from 1 up", found=check_every, fix="leave it away")
    modules = named_modules(model)
    if optimizer is not None:
        check_optimizer(optimizer, modules)
    code = getattr(function, "__code__", None)
    definition = JobDefinition(
        name=getattr(function, "__name__", "job"),
        function=function,
        modules=modules,
        optimizer=optimizer,
        line="" if code is None else f"{code.co_filename}:{code.co_firstlineno}",
        check_every=check_every,
    )
    return Job(definition, world)


def named_modules(model: Models) -> dict[str, nn.Module]:
    """The modules of a job by name: "model", "model_0" and so on, or the names given."""
    if isinstance(model, nn.Module):
        return {"model": model}
    named = (
        dict(model) if isinstance(model, Mapping) else {f"model_{place}": module for place, module in enumerate(model)}
    )
    for name, module in named.items():
        if not isinstance(module, nn.Module) or not name.isidentifier():
            raise PlanError(
                expected="model= to be a torch.nn.Module, a list of them, or a dict of them by name",
                found=f"{type(module).__name__} under the name {name!r}",
                fix="pass modules; other things the job may read from its closure",
            )
    return named


def check_optimizer(optimizer: Optimizer, modules: Mapping[str, nn.Module]) -> None:
    """Refuse an optimizer that could not be right on a mesh."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise PlanError(
            expected="an optimizer that steps once per batch",
            found="LBFGS, which calls the loss several times per step",
            fix="use another optimizer",
        )
    known = {id(parameter) for module in modules.values() for parameter in module.parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise PlanError(
                    expected="an optimizer of the parameters of the modules given as model=",
                    found=f"a parameter of shape {list(parameter.shape)} that is in none of them",
                    fix="pass its module too: model=[model, other]",
                )


def loss_of(result: Any) -> Tensor:
    """The loss in a train job's result, as one number."""
    loss = result
    if isinstance(result, Mapping):
        loss = result["loss"]
    elif isinstance(result, tuple | list):
        loss = result[0]
    tensor: Tensor = loss
    return tensor.detach().mean()

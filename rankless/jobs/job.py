"""Jobs: functions on whole batches that the system runs on one device or on many.

On one device a job runs as the plain script would. On a mesh it is captured, placed, lowered and run (see `program`).
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Generic, ParamSpec, Self, TypeVar, cast, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from rankless.compiler.capture.global_modes import apply_autocast_state, disable_autocast, get_autocast_state
from rankless.context.forgotten_optimizer_warning import MissingOptimizerCheck
from rankless.context.redundant_step_calls import StepHook
from rankless.context.world import World, WorldSource
from rankless.errors import ConfigError, RanklessError, TableError
from rankless.jobs.arguments import BatchDims, FlattenedArguments, flatten_arguments
from rankless.jobs.call_seed import seed_call
from rankless.jobs.declared_argument_shapes import PerDevice, Placeholder, PlaceholderCheck, read_placeholders
from rankless.jobs.dtype_override import cast_arguments, require_floating, use_default_dtype
from rankless.jobs.job_definition import (
    CallResult,
    JobDefinition,
    Models,
    Optimizers,
    RandomSource,
    StepOptions,
    View,
    as_function,
    list_optimizers,
    make_plan,
    name_modules,
    require_divisible_states,
    require_optimizer,
    require_settings,
    require_weighted_calls,
)
from rankless.jobs.optimizer_step import (
    OptimizerStepper,
    OtherGradients,
    count_group_parameters,
    require_fitting_optimizers,
)
from rankless.jobs.views.call_error_explanations import explain_failure
from rankless.jobs.views.captured import ConsistentView
from rankless.jobs.views.view_choice_and_recovery import WorldView, divides_states
from rankless.ownership.state_owner import StateOwner
from rankless.parallel.user_plan import PlanSource
from rankless.records.parallel_plan import JobPlan, Recompute
from rankless.user_code import caller_line, display_name, is_user_code

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Job(Generic[Parameters, Result]):
    """A function on whole batches that trains, if it has an optimizer, or predicts.

    `rankless.job` makes it. Use it as an annotation too: `rankless.Job[[Tensor, Tensor], Tensor]`.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> @rankless.job(model=model)
        ... def predict(inputs):
        ...     return model(inputs)
        >>> isinstance(predict, rankless.Job)
        True
    """

    def __init__(self, definition: JobDefinition, world: WorldSource) -> None:
        functools.update_wrapper(self, definition.function)
        self.definition = definition
        self._world = world
        self._views = WorldView(definition)
        self._was_called = False
        self._stepper: OptimizerStepper | None = None
        self._optimizer_check = MissingOptimizerCheck(definition.label, definition.modules)
        self._step_hooks = [StepHook(self) for _ in definition.optimizers]
        for hook, optimizer in zip(self._step_hooks, definition.optimizers, strict=True):
            optimizer.register_step_pre_hook(hook)
        self._stepped = False
        self._others = OtherGradients()
        self._group_sizes = count_group_parameters(definition)
        self._batch_dims: BatchDims | None = None
        placeholders = read_placeholders(definition.function, definition.name, definition.line)
        self._check = PlaceholderCheck(definition.function, placeholders, definition.line)
        self._dtype: torch.dtype | None = None

    def configure(
        self,
        batch_dims: Mapping[str, int | None],
        dtype: torch.dtype | None = None,
        random: RandomSource = "generator",
        recompute: Recompute | None = None,
        plan: PlanSource | None = None,
    ) -> Self:
        """Say which dim of which argument holds the batch, None for one that is not batch, and the dtype where neither
        a placeholder nor the function names one, where random numbers come from, what is computed again for
        gradients, and how models are divided; the job itself.
        """
        given = make_plan(plan, self.definition)
        self.definition = replace(self.definition, random=random, recompute=recompute, plan=given)
        self._views = WorldView(self.definition)
        require_settings(self.definition)
        if batch_dims:
            self._batch_dims = BatchDims(self.definition.function, batch_dims)
        if dtype is not None:
            require_floating(dtype, self.definition.line)
            self._dtype = dtype
            self._check = replace(self._check, dtype=dtype)
        return self

    @property
    def was_called(self) -> bool:
        """Whether this process has called the job.

        Example:
            >>> rankless.job(model=torch.nn.Linear(3, 1))(print).was_called
            False
        """
        return self._was_called

    @property
    def plan(self) -> JobPlan | None:
        """How the job is divided between workers; None before its first call, on one worker, and in other views.

        Example:
            >>> rankless.job(model=torch.nn.Linear(3, 1))(print).plan is None
            True
        """
        view = self._views.view
        return view.division.plan if self._was_called and isinstance(view, ConsistentView) else None

    @property
    def owner(self) -> StateOwner:
        """What holds the job's parameters, gradients and optimizer state.

        Example:
            >>> job = rankless.job(model=torch.nn.Linear(3, 1))(print)
            >>> job.owner.version
            0
        """
        return self._world().owner if self.was_called else StateOwner()

    def divide_states(self) -> None:
        """Divide the job's states between workers now, if its first call would. Collective.

        `rankless.load` calls it, so that no worker reads the whole state of an optimizer.

        Example:
            >>> rankless.job(model=torch.nn.Linear(3, 1))(print).divide_states()
        """
        world, job = self._world(), self.definition
        if divides_states(job, world):
            view = self._views.find(world)
            assert isinstance(view, ConsistentView)
            view.divide_states()

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        """Run the job on a whole batch. A train job also makes its optimizer's step.

        Args:
            *args: The function's positional arguments, with whole batches: tensors of shape (batch_size, ...), or
                what a `rankless.loader` yields.
            **kwargs: The function's keyword arguments.

        Returns:
            The function's result for the whole batch, the same on every rank: tensors without gradient, other values
            as they are.

        Raises:
            CaptureError: On several ranks, or with `accumulate`: the function cannot become one program.
            DataError: An argument does not match its `Whole` or `PerDevice` annotation.
            RanksDiverged: Another rank makes another call, or passes other values.
            StepError: With `check_finite=True`, the loss or a gradient is not finite.
            RanklessError: The call is inside `rankless.once`.

        Example:
            >>> model = torch.nn.Linear(3, 1)
            >>> predict = rankless.job(model=model)(lambda inputs: model(inputs))
            >>> predict(torch.ones(4, 3)).shape
            torch.Size([4, 1])
        """
        world, job = self._world(), self.definition
        world.require_not_in_once(f"job {job.name!r}")
        with world.operations.prepare(world.mesh):
            arguments = self._prepare(world, args, kwargs)
        world.script.leftovers.begin_call(job.label)
        try:
            with self._others.add_up(job, is_first=self._stepper is None or not self._stepper.unfinished_calls()):
                evaluate = make_evaluation(job, world, self._dtype, lambda: self._run(world, arguments))
                outcome = evaluate()
                current = world.current  # without workers that were lost meanwhile
                with current.operations.change(current.mesh):
                    self._step(current, outcome, evaluate)
        except RanklessError as error:
            # The message names the script's line. The frames below this one belong to Rankless and PyTorch.
            known = error.add_location(job.line) if isinstance(error, TableError) else error
            raise known.with_traceback(None) from error.__cause__
        except Exception as error:  # the script's own code raised it, perhaps under a hundred frames of capture
            failure = explain_failure(job, world, error)
            raise failure from failure.__cause__
        world = world.current
        world.present_owner.end_call()
        world.events.end_call(job, outcome.result, outcome.loss)
        if self._stepped and self._stepper is not None:
            self._stepper.report_step()
        if not job.trains:
            self._optimizer_check.count_call(outcome.result, world)
        return cast(Result, outcome.result)

    def _prepare(self, world: World, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlattenedArguments:
        """Check the arguments of a call, and return them. Begin to observe the job at its first call."""
        job = self.definition
        if self._check.placeholders:
            self._check(args, kwargs, recast=world.settings.dtype is not None)
        self._views.find(world)
        if not self._was_called:
            self._was_called = True
            for hook in self._step_hooks:
                hook.leftovers = world.script.leftovers
        if job.trains and count_group_parameters(job) != self._group_sizes:
            require_fitting_optimizers(job)
            self._group_sizes = count_group_parameters(job)
        world.events.begin_call(job)
        arguments = flatten_arguments(args, kwargs, job.device(world.mesh.device))
        if self._batch_dims is not None:
            arguments = self._batch_dims.apply(arguments)
        return arguments if world.settings.dtype is None else cast_arguments(arguments, world.settings.dtype)

    def _run(self, world: World, arguments: FlattenedArguments) -> CallResult:
        """Return the result of a call. A train job also sets its parameters' gradients."""
        finish = self._views.run(world.current, arguments)  # others may be lost between evaluations, or meanwhile
        with world.operations.change(world.current.mesh):
            return finish()

    def _step(self, world: World, outcome: CallResult, evaluate: Callable[[], CallResult]) -> None:
        """Add a call to a step of the optimizers, or make the step."""
        self._stepped = outcome.is_elsewhere
        if outcome.loss is None:
            return
        with disable_autocast(self.definition.device(world.mesh.device).type):
            self._stepped = self._get_stepper(world).add_call(outcome, outcome.loss, evaluate)
            world.joint.end_step()
            self._views.prepare_next_call(world)

    @property
    def stepped(self) -> bool:
        """Whether the last call made the optimizer's step.

        With `accumulate=k` every k-th call does, and the last call of a pass over a loader.

        Example:
            >>> model = torch.nn.Linear(3, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> train = rankless.job(model=model, optimizer=optimizer)(lambda inputs: model(inputs).mean())
            >>> _ = train(torch.ones(4, 3))
            >>> train.stepped
            True
        """
        return self._stepped

    @property
    def gradient_norm(self) -> Tensor:
        """The norm of the whole gradient at the last step, before clipping: a 0-dim tensor, equal on every rank.

        Raises:
            ConfigError: The job has neither `gradient_norm=True` nor `clip_norm`, or has made no step yet.

        Example:
            >>> model = torch.nn.Linear(1, 1, bias=False)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> @rankless.job(model=model, optimizer=optimizer, clip_norm=1.0)
            ... def train(inputs):
            ...     return model(inputs).mean()
            >>> _ = train(torch.full((4, 1), 2.0))
            >>> train.gradient_norm
            tensor(2.)
        """
        norm = None if self._stepper is None else self._stepper.gradient_norm
        if norm is None:
            asked = self.definition.step_options.measures_norm
            raise ConfigError(
                expected=f"a step of job {self.definition.name!r} whose gradient was measured",
                found="no step yet" if asked else "a job that does not measure it",
                fix="read it after a step" if asked else "pass gradient_norm=True (or clip_norm=) to rankless.job",
                where=self.definition.line,
            )
        return norm

    def flush(self) -> bool:
        """Make the optimizer's step for the calls since the last step, with `accumulate=k`.

        The end of a pass over a `rankless.loader` calls it. Call it at the end of a loop without a loader.

        Returns:
            Whether it made a step; False if there were no calls.

        Example:
            >>> model = torch.nn.Linear(3, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> @rankless.job(model=model, optimizer=optimizer, accumulate=2)
            ... def train(inputs):
            ...     return model(inputs).mean()
            >>> _ = train(torch.ones(4, 3))
            >>> train.stepped, train.flush()
            (False, True)
        """
        if self._stepper is None:
            return False
        world = self._world()
        world.operations.begin(world.mesh)
        with world.operations.change(world.mesh):
            if not self._stepper.flush():
                return False
            world.joint.end_step()
        self._stepper.report_step()
        return True

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has, for example in a process of `rankless.spawn`: the definition, with models and
        optimizers as they are. Programs and groups belong to this process. The copy makes its own at its first call.
        """
        pending = None if self._stepper is None else self._stepper.unfinished_calls()
        if pending is not None:
            raise ConfigError(
                expected="a job to copy, or to use in rankless.spawn, without accumulated gradients",
                found=pending,
                fix="make that step first",
            )
        return {
            **self.__dict__,
            "_views": WorldView(self.definition),
            "_was_called": False,
            "_stepper": None,
            "_others": OtherGradients(),
            "_stepped": False,
        }

    def _get_stepper(self, world: World) -> OptimizerStepper:
        if self._stepper is None:
            self._stepper = OptimizerStepper(self.definition, world)
        self._stepper.use(world)
        return self._stepper

    def __get__(self, instance: object, owner: type) -> Self:
        """The job itself from its class; from an instance it could not take its `self`, and that is refused."""
        if instance is None:
            return self
        name = self.definition.name
        raise ConfigError(
            expected="a job made of a function, or of a method that has its object",
            found=f"@rankless.job on the method {owner.__name__}.{name}",
            fix=f"leave the method plain, and in __init__: self.{name} = rankless.job(model=…)(self.{name})",
            where=self.definition.line,
        )


def make_evaluation(
    job: JobDefinition, world: World, dtype: torch.dtype | None, run: Callable[[], CallResult]
) -> Callable[[], CallResult]:
    """Return a function that runs a job's function each time as the script's call does.

    Args:
        job: The job.
        world: Its world.
        dtype: The default dtype in which the job was defined.
        run: Runs the function.
    """
    device = job.device(world.mesh.device)
    autocast = get_autocast_state(device.type)

    def evaluate() -> CallResult:
        with (
            apply_autocast_state(autocast),
            use_default_dtype(world.settings.dtype or dtype),
            world.script.leftovers.inside_job(),
            seed_call(job, device),
        ):
            return run()

    return evaluate


def make_job(
    function: Callable[Parameters, Result],
    *,
    model: Models,
    optimizer: Optimizers | None,
    view: str | None,
    world: WorldSource,
    step_options: StepOptions | None = None,
) -> Job[Parameters, Result]:
    """A job from a function; see `rankless.job` for what the arguments mean."""
    function = as_function(function)
    code = getattr(function, "__code__", None)
    name = getattr(function, "__name__", "job")
    line = "" if code is None else f"{display_name(code.co_filename)}:{code.co_firstlineno}"
    if code is None or not is_user_code(code.co_filename):  # a module, or its forward
        line = caller_line()
    definition = JobDefinition(
        name=name,
        function=function,
        modules=name_modules(model),
        optimizers=list_optimizers(optimizer),
        step_options=step_options or StepOptions(),
        view=resolve_view(view, read_placeholders(function, name, line), line),
        line=line,
    )
    definition.step_options.validate()
    require_optimizer(definition)
    require_weighted_calls(definition)
    require_fitting_optimizers(definition)
    require_divisible_states(definition)
    return Job(definition, world)


def resolve_view(view: str | None, placeholders: Mapping[str, Placeholder], line: str) -> View:
    """Return the view that the script names, or that the placeholders imply."""
    is_list = {name for name, item in placeholders.items() if isinstance(item, PerDevice)}
    if view not in (None, *get_args(View)):
        raise ConfigError(
            expected='view="consistent" or view="mirrored"',
            found=f"view={view!r}",
            fix="omit view= for whole batches; the mirrored view takes lists with one element per device",
            where=line,
        )
    if view in ("consistent", "whole") and is_list:
        raise ConfigError(
            expected="whole batches in the consistent view, and with capture=False",
            found=f"PerDevice on {', '.join(sorted(is_list))}",
            fix='use Whole there, or view="mirrored"',
            where=line,
        )
    if view == "whole":
        return "whole"
    return "mirrored" if view == "mirrored" or is_list else "consistent"


def find_jobs(objects: Iterable[Any]) -> Iterator[Job[Any, Any]]:
    """Yield the jobs of all optimizers among some objects.

    Example:
        >>> import torch
        >>> import rankless
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> train = rankless.job(model=model, optimizer=optimizer)(lambda inputs: model(inputs).mean())
        >>> list(find_jobs([model, optimizer])) == [train]
        True
    """
    for item in objects:
        for hook in item._optimizer_step_pre_hooks.values() if isinstance(item, Optimizer) else ():
            if isinstance(hook, StepHook) and isinstance(hook.job, Job):
                yield hook.job


def divide_states_of_jobs(objects: Iterable[Any]) -> None:
    """Divide the states of the jobs of all optimizers among some objects, before these load a state. Collective."""
    for job in find_jobs(objects):
        job.divide_states()

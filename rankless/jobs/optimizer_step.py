"""Turn the gradients of a job's calls into optimizer steps: accumulate, check, measure, clip, step.

Note [closures]: some optimizers compute the loss as often as they need it in one step, as `torch.optim.LBFGS` does. A
plain script gives them a closure, which computes loss and gradients. For a job the closure is the job's own function
with the arguments of the call. Its first evaluation is the call itself, and each further one runs the program again,
with the parameters that the optimizer has set. All workers get the same loss and gradients, bit for bit. So every
worker's optimizer decides the same, and evaluates as often.
"""

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_
from torch.optim import Optimizer

from rankless.context.accumulation_passes import AccumulationPass
from rankless.context.world import World
from rankless.errors import ConfigError, StepError
from rankless.jobs.gradient_accumulation import GradientAccumulator
from rankless.jobs.job_definition import CallResult, JobDefinition, StepOptions
from rankless.ownership.modules_with_states_elsewhere import list_extension_modules
from rankless.parallel.mesh import find_pipeline_axis, list_layer_axes


class OptimizerStepper:
    """Makes the steps of one train job. All gradients are whole, so every rank makes the same step."""

    def __init__(self, job: JobDefinition, world: World) -> None:
        self.steps = 0
        """Number of steps so far."""
        self.gradient_norm: Tensor | None = None
        """Norm of the whole gradient of the last step, before clipping."""
        self._job = job
        self._world = world
        self._accumulator = self._make_accumulator()
        self._owner = world.owner
        self._hides = hides_gradients(job, world)
        self._hidden: list[tuple[Tensor, Tensor | None]] = []
        """Parameters without `.grad` after the last call, and the gradients that a participant compares."""
        self._parameters: Sequence[Tensor] = ()
        self._train_calls = 0
        """How many calls of all train jobs there had been at the last call."""
        self._holders: dict[int, Tensor] = {}
        """What had the gradient of each parameter at the last call, by the parameter's id."""
        self._calls = 0
        self._closure: Callable[[], Any] | None = None
        """Evaluates the last call; see Note [closures]."""
        self._pass: weakref.ref[AccumulationPass] | None = None
        self._calls_in_pass = 0
        if job.step_options.accumulate > 1:
            world.passes.subscribe(self)

    def use(self, world: World) -> None:
        """Step in a world from now on: it is another one after a worker was lost."""
        self._world, self._owner = world, world.present_owner

    def add_call(self, outcome: CallResult, loss: Tensor, evaluate: Callable[[], CallResult]) -> bool:
        """Add the call whose gradients the job's parameters hold. Returns True if this made a step.

        Args:
            outcome: The call's result.
            loss: The loss in it.
            evaluate: Runs the job's function again with the same arguments; see Note [closures].
        """
        job, accumulate = self._job, self._job.step_options.accumulate
        self._parameters = parameters = outcome.parameters
        self._closure = functools.partial(self._evaluate, iter([outcome]), evaluate)
        self._calls += 1
        self._train_calls = self._world.script.leftovers.train_calls
        holders = self._owner.get_holders(parameters)
        if accumulate > 1:
            self._enter_pass()
            self._owner.note_sums(self)
            self._follow_division(holders)
            holders = self._list_holders(parameters)
        try:
            if job.step_options.check_finite:
                self._require_finite(loss, parameters)
            if accumulate > 1:
                self._accumulator.add(holders, outcome.weights, job=job.name, line=job.line)
        except StepError:
            self._accumulator.restore(holders)
            raise
        if accumulate == 1:
            self._step()
        self._hide_gradients()
        self._world.script.leftovers.end_call(job.label, parameters, job.optimized_parameters)
        if accumulate == 1:
            return True
        current = None if self._pass is None else self._pass()
        is_last = current is not None and current.is_last_batch and self._calls_in_pass == current.batch
        return self.flush() if is_last or self._accumulator.calls == accumulate else False

    def flush(self) -> bool:
        """Make a step of the calls since the last one. Returns False if there are none."""
        if not self._accumulator.calls:
            return False
        self.use(self._world.current)
        self._world.run_on_states(self._owner.begin_call)
        holders = self._owner.get_holders(self._parameters)
        self._follow_division(holders)
        if self._world.script.leftovers.train_calls != self._train_calls:
            restored = self._job.optimized_parameters(self._parameters)  # `.grad` is of another job
        else:
            restored = [parameter for parameter, _ in self._hidden]
        self._accumulator.restore(self._list_holders(restored))
        self._step()
        self._hide_gradients()
        self._owner.end_call()
        return True

    def find_sum(self, holder: Tensor) -> Tensor | None:
        """Return the gradient that is accumulated for a shard; None if there is none."""
        return self._accumulator.find(holder)

    def make_sum_whole(self, parameter: Tensor, shards: Sequence[Tensor], whole: Tensor) -> None:
        """Let a parameter hold its whole accumulated gradient, in place of its shards: a worker was lost."""
        for shard in shards:
            self._accumulator.take(shard)
        self._accumulator.put(parameter, whole)

    def _list_holders(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return all tensors with gradients on which this worker steps: holders, and copies of others' shards."""
        copies = [copy for parameter in parameters for copy in self._owner.get_copies(parameter).values()]
        return [*self._owner.get_holders(parameters), *copies]

    def _follow_division(self, holders: Sequence[Tensor]) -> None:
        """Move accumulated gradients to what holds them now.

        Another job may have divided parameters since, or all were made whole because a worker was lost.
        """
        for parameter, holder in zip(self._parameters, holders, strict=True):
            for before in (self._holders.get(id(parameter), holder), parameter):
                whole = self._accumulator.take(before) if before is not holder else None
                if whole is not None:
                    self._accumulator.put(holder, self._owner.divide_gradient(parameter, whole))
                    for worker, copy in self._owner.get_copies(parameter).items():
                        self._accumulator.put(copy, self._owner.copy_gradient(parameter, whole, worker))
        self._holders = {id(item): holder for item, holder in zip(self._parameters, holders, strict=True)}

    def on_pass_end(self, ended: AccumulationPass) -> None:
        """Make the step of the last calls of a pass."""
        if self._pass is not None and self._pass() is ended:
            self._pass = None
            if self.flush():
                self._world.joint.end_step()
                self.report_step()

    def report_step(self) -> None:
        """Tell the participants of the run of the latest step."""
        events = self._world.events
        # Gathering gradients takes all ranks, and time: a participant asks for it by `compares_values`.
        with self._show_gradients() if events.compares_values else contextlib.nullcontext():
            events.end_step(self._job)

    def unfinished_calls(self) -> str | None:
        """Describe the calls without a step, or return None."""
        if not self._accumulator.calls:
            return None
        return (
            f"{self._job.line}: {self._accumulator.calls} of {self._job.step_options.accumulate} calls of job "
            f"{self._job.name!r} were accumulated without a step; call {self._job.name}.flush() after the loop to "
            "make it"
        )

    def _enter_pass(self) -> None:
        """Remember the pass of this call. Warn if the script left the previous one with calls without a step."""
        current = self._world.passes.current_pass()
        before = None if self._pass is None else self._pass()
        if current is not None and current is before:
            self._calls_in_pass += 1
            return
        if self._pass is not None and self._accumulator.calls:
            self._world.notify(
                f"{self._job.line}: the script left the loop over a loader with {self._accumulator.calls} of "
                f"{self._job.step_options.accumulate} calls of job {self._job.name!r} accumulated; the next step "
                f"includes them. Call {self._job.name}.flush() after the loop to make a step of them"
            )
        self._pass = None if current is None else weakref.ref(current)
        self._calls_in_pass = 1

    def _hide_gradients(self) -> None:
        """Leave no `.grad` where workers have only shards of gradients."""
        if self._hides:
            self._world.script.hidden_gradients.add(self._parameters)
            if self._job.step_options.zero is None:
                self._world.notify(
                    f"{self._job.line}: parameters of job {self._job.name!r} have no .grad after a call, because each "
                    "worker has its part of the gradients only; with gradient_norm=True the job has their norm"
                )
        is_compared = self._world.events.compares_values
        self._hidden = [
            (parameter, parameter.grad if is_compared else None)
            for parameter in self._world.script.hidden_gradients.select(self._parameters)
        ]
        for parameter, _ in self._hidden:
            parameter.grad = None

    @contextlib.contextmanager
    def _show_gradients(self) -> Iterator[None]:
        """Within the context, parameters have their whole gradients, which a participant compares."""
        for parameter, hidden in self._hidden:
            parameter.grad = self._owner.gather_gradient(parameter) if hidden is None else hidden
        try:
            yield
        finally:
            for parameter, _ in self._hidden:
                parameter.grad = None

    def _make_accumulator(self) -> GradientAccumulator:
        return GradientAccumulator(list_extension_modules(self._job.modules.values()) if self._job.accumulates else ())

    def _step(self) -> None:
        """Measure and clip the whole gradient, then step."""
        self._accumulator = self._make_accumulator()
        optimized = self._job.optimized_parameters(self._parameters)
        with self._world.script.leftovers.inside_job():
            self._clip_and_step(optimized)
        self._world.script.model_changes.record_versions(optimized)
        self.steps += 1

    def _clip_and_step(self, optimized: Sequence[Tensor]) -> None:
        """Measure and clip the whole gradient, then let the optimizers step."""
        options, owner = self._job.step_options, self._owner
        if options.measures_norm or options.clip_value is not None:
            self._require_dense(optimized, owner.get_holders(optimized))
        if options.measures_norm:
            self.gradient_norm = self._world.run_on_states(
                lambda: owner.measure_norm(owner.get_holders(optimized)), is_in_step=True
            )
        holders = self._list_holders(optimized)  # others if a worker was lost meanwhile
        if options.clip_norm is not None and self.gradient_norm is not None:
            with_gradient = [item for item in holders if item.grad is not None]
            clip_grads_with_norm_(with_gradient, options.clip_norm, self.gradient_norm)
        if options.clip_value is not None:
            clip_grad_value_(holders, options.clip_value)
        for optimizer in self._job.optimizers:
            with self._world.joint.step(optimizer):
                if needs_closure(optimizer):
                    self._step_with_closure(optimizer)
                else:
                    owner.step(optimizer)
            if self._world.mesh.desync_detector is not None:
                self._world.script.optimizer_changes.record(optimizer)

    def _step_with_closure(self, optimizer: Optimizer) -> None:
        """Let an optimizer evaluate the loss as often as it needs; see Note [closures]."""
        world = self._world
        found = world.joint.own_steps or None
        if found is None and hides_gradients(self._job, world):
            found = "workers that each have a part of the gradients"
        if found is not None:
            raise ConfigError(
                expected=f"workers that each have all parameters and gradients, because {type(optimizer).__name__} "
                "computes the loss several times in a step",
                found=found,
                fix="run on one device, or on workers that divide batches alone (-n N without --mesh and servers), "
                "or use another optimizer",
                where=self._job.line,
            )
        optimizer.step(self._closure)

    def _evaluate(self, known: Iterator[CallResult], evaluate: Callable[[], CallResult]) -> Tensor:
        """Return the loss, whose gradients the parameters have then: first that of the call itself."""
        outcome = next(known, None)
        if outcome is None:
            self._world.script.model_changes.record_versions(self._job.optimized_parameters(self._parameters))
            with torch.enable_grad():
                outcome = evaluate()
        assert outcome.loss is not None
        return outcome.loss

    def _require_dense(self, optimized: Sequence[Tensor], holders: Sequence[Tensor]) -> None:
        """Raise `StepError` for sparse gradients, which PyTorch does not clip either."""
        for parameter, holder in zip(optimized, holders, strict=True):
            if holder.grad is not None and holder.grad.layout != torch.strided:
                raise StepError(
                    expected="dense gradients with clip_norm=, clip_value= or gradient_norm=, as in PyTorch",
                    found=f"a sparse gradient of {self._job.parameter_name(parameter)}",
                    fix="omit these options, or use sparse=False in the embedding",
                    where=self._job.line,
                )

    def _require_finite(self, loss: Tensor, parameters: Sequence[Tensor]) -> None:
        """Raise `StepError` on every rank if the loss or a gradient is not finite; make no step."""
        owner = self._owner
        worst = self._world.run_on_states(lambda: owner.find_not_finite(owner.get_holders(parameters)), is_in_step=True)
        if not bool(loss.isfinite()):
            found = f"a loss of {float(loss)}"
        elif worst is not None:
            found = f"the gradient of {self._job.parameter_name(parameters[worst])}"
        else:
            return
        raise StepError(
            expected=f"finite numbers in step {self.steps + 1} of job {self._job.name!r} (call {self._calls})",
            found=f"{found} is not finite" if not found.startswith("a loss") else found,
            fix="check this call's batch, lower the learning rate, or clip the gradient; no step was made, parameters "
            "and optimizer are unchanged",
            where=self._job.line,
        )


def hides_gradients(job: JobDefinition, world: World) -> bool:
    """Return whether gradients are divided between workers, so that a script finds none in `.grad`.

    With `zero=` it finds none on one device either.

    Args:
        job: The job.
        world: Has the mesh, and the plan of the run if it was given one.
    """
    plan = world.settings.plan
    if job.captured and (find_pipeline_axis(world.mesh) is not None or list_layer_axes(world.mesh)):
        return True
    if plan is not None and job.name in plan.jobs:
        return any(state.gradient for state in plan.jobs[job.name].states.values())
    return job.step_options.zero in ("gradients", "parameters")


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer computes the loss itself, because its `step` must have a closure."""
    _, *parameters = inspect.signature(type(optimizer).step).parameters.values()
    return any(each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters)


def require_fitting_optimizers(job: JobDefinition) -> None:
    """Raise `ConfigError` for an optimizer that cannot step the job."""
    _require_known_parameters(job)
    _require_steps_with_closures(job)


def _require_steps_with_closures(job: JobDefinition) -> None:
    """Raise `ConfigError` for options, views and further optimizers that do not go with a step with a closure."""
    name = next((type(each).__name__ for each in job.optimizers if needs_closure(each)), None)
    if name is None:
        return
    options, plain = job.step_options, StepOptions()
    given = [field for field in vars(plain) if getattr(options, field) != getattr(plain, field)]
    found = None
    if len(job.optimizers) > 1:
        found = f"{len(job.optimizers)} optimizers"
    elif job.view == "mirrored":
        found = 'view="mirrored"'
    elif given and given != ["check_synchronized_every"]:
        found = " and ".join(f"{field}={getattr(options, field)!r}" for field in given)
    if found is not None:
        raise ConfigError(
            expected=f"{name}, which computes the loss several times in a step, as the job's only optimizer, and no "
            "options for gradients",
            found=f"{found} on job {job.name!r}",
            fix="omit the options and other optimizers, or use another optimizer",
            where=job.line,
        )


def _require_known_parameters(job: JobDefinition) -> None:
    """Raise `ConfigError` for an optimizer with parameters that no module of the job has."""
    known = {id(parameter) for module in job.modules.values() for parameter in module.parameters()}
    for parameter in job.optimized_parameters():
        if id(parameter) not in known:
            raise ConfigError(
                expected="an optimizer whose parameters belong to the modules in model=",
                found=f"a parameter of shape {list(parameter.shape)} that belongs to none of them",
                fix="pass its module too: model=[model, other]",
            )


def count_group_parameters(job: JobDefinition) -> list[Any]:
    """Return the number of parameters of each group, which changes when a script adds a group."""
    return [len(group["params"]) for optimizer in job.optimizers for group in optimizer.param_groups]


class OtherGradients:
    """The gradients of parameters that no optimizer of a job steps: they add up over calls, as in the plain script.

    `optimizer.zero_grad()` clears the gradients of the optimizer's own parameters only. So a job clears those too, and
    no others: the gradients of a second network, of a head that is not trained yet, or of a parameter that replaced
    another.
    """

    def __init__(self) -> None:
        self._before: dict[int, Tensor] = {}
        """Their gradients before the first call of a step, by the parameter's id."""
        self._shown: dict[int, Tensor] = {}
        """Their gradients after the latest call."""

    @contextlib.contextmanager
    def add_up(self, job: JobDefinition, *, is_first: bool) -> Iterator[None]:
        """Within the context a call computes gradients, which are then added to those that were there before.

        Args:
            job: The job.
            is_first: Whether it is the first call of a step. A later one computes that of all its calls.
        """
        others = find_others(job) if job.trains else []
        given = [(item, item.grad) for item in others]
        before = {
            id(item): self._before.get(id(item)) if not is_first and self._shown.get(id(item)) is gradient else gradient
            for item, gradient in given
            if gradient is not None
        }
        self._before = {key: gradient for key, gradient in before.items() if gradient is not None}
        for item in others:
            item.grad = None
        is_done = False
        try:
            yield
            is_done = True
        finally:
            if not is_done:
                for item, gradient in given:
                    item.grad = gradient
        for item in others:
            known = self._before.get(id(item))
            if known is not None:
                item.grad = known if item.grad is None else known + item.grad
        self._shown = {id(item): item.grad for item in others if item.grad is not None}


def find_others(job: JobDefinition) -> Sequence[Tensor]:
    """Return the parameters of a job's modules that none of its optimizers has."""
    stepped = {id(item) for optimizer in job.optimizers for group in optimizer.param_groups for item in group["params"]}
    return [item for item in job.parameters() if id(item) not in stepped]

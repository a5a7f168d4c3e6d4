"""From the gradients of a job's calls to its optimizers' steps: gathered, checked, measured, clipped, stepped."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from rankless.context.loader_passes import LoaderPass
from rankless.context.world import World
from rankless.errors import ConfigError, StepError
from rankless.jobs.definition import JobDefinition
from rankless.jobs.gradient_accumulation import GradientAccumulator, LossWeight


class OptimizerStepper:
    """Makes the steps of one train job. All gradients are whole, so all ranks do the same."""

    def __init__(self, job: JobDefinition, world: World) -> None:
        self.steps = 0
        """Steps made so far."""
        self.gradient_norm: Tensor | None = None
        """The norm of the last step's whole gradient, before clipping."""
        self._job = job
        self._world = world
        self._accumulator = GradientAccumulator()
        self._calls = 0
        self._pass: weakref.ref[LoaderPass] | None = None
        self._calls_in_pass = 0
        if job.step_options.accumulate > 1:
            world.passes.subscribe(self)

    def add_call(self, loss: Tensor, weights: Sequence[LossWeight]) -> bool:
        """Take in the call whose gradients the parameters hold; True if it made a step."""
        job, wanted = self._job, self._job.step_options.accumulate
        parameters = job.parameters()
        self._calls += 1
        if wanted > 1:
            self._enter_pass()
        try:
            if job.step_options.check_finite:
                self._require_finite(loss, parameters)
            if wanted > 1:
                self._accumulator.add(parameters, weights, job=job.name, line=job.line)
        except StepError:
            self._accumulator.restore(parameters)
            raise
        if wanted == 1:
            self._step()
            return True
        current = None if self._pass is None else self._pass()
        is_last = current is not None and current.is_last_batch and self._calls_in_pass == current.batch
        return self.flush() if is_last or self._accumulator.calls == wanted else False

    def flush(self) -> bool:
        """Make a step of the calls gathered so far; False if there are none."""
        if not self._accumulator.calls:
            return False
        self._step()
        return True

    def on_pass_end(self, ended: LoaderPass) -> None:
        """Make the step of a last group."""
        if self._pass is not None and self._pass() is ended:
            self._pass = None
            if self.flush():
                self.report_step()

    def report_step(self) -> None:
        """Tell whoever counts or compares steps of the one just made."""
        if self._world.recorder is not None:
            self._world.recorder.record_step(job=self._job.name, model=self._job.modules)
        if self._world.limit is not None:
            self._world.limit.count_step()

    def unfinished_calls(self) -> str | None:
        """What has been gathered and not stepped, in words."""
        if not self._accumulator.calls:
            return None
        return (
            f"{self._job.line}: {self._accumulator.calls} of {self._job.step_options.accumulate} calls of job "
            f"{self._job.name!r} were gathered and no step was made of them; call {self._job.name}.flush() after "
            "the loop to make it"
        )

    def _enter_pass(self) -> None:
        """Note the pass that this call belongs to; say so if the last one was left with calls in hand."""
        current = self._world.passes.current_pass()
        before = None if self._pass is None else self._pass()
        if current is not None and current is before:
            self._calls_in_pass += 1
            return
        if self._pass is not None and self._accumulator.calls:
            self._world.notify(
                f"{self._job.line}: the loop over a loader was left with {self._accumulator.calls} of "
                f"{self._job.step_options.accumulate} calls of job {self._job.name!r} gathered; they go into the next "
                f"step. Call {self._job.name}.flush() after the loop to make a step of them"
            )
        self._pass = None if current is None else weakref.ref(current)
        self._calls_in_pass = 1

    def _step(self) -> None:
        """Measure and clip the whole gradient, and step."""
        self._accumulator = GradientAccumulator()
        step_options = self._job.step_options
        parameters = [item for item in self._job.optimized_parameters() if item.grad is not None]
        if step_options.clip_norm is not None:
            self.gradient_norm = clip_grad_norm_(parameters, step_options.clip_norm).detach().clone()
        elif step_options.gradient_norm:
            gradients = [item.grad for item in parameters if item.grad is not None]
            self.gradient_norm = get_total_norm(gradients).detach().clone()
        if step_options.clip_value is not None:
            clip_grad_value_(parameters, step_options.clip_value)
        for optimizer in self._job.optimizers:
            optimizer.step()
        self._world.model_changes.record_versions(self._job.optimized_parameters())
        self.steps += 1

    def _require_finite(self, loss: Tensor, parameters: Sequence[Tensor]) -> None:
        """Raise on every rank alike if the loss or a gradient is not finite; no step is made."""
        held = [item for item in parameters if item.grad is not None]
        gradients = [item.grad for item in held if item.grad is not None]
        largest = torch._foreach_norm(gradients, float("inf"))
        if bool(torch.stack([loss.isfinite(), *(item.isfinite() for item in largest)]).all()):
            return
        if not bool(loss.isfinite()):
            found = f"a loss of {float(loss)}"
        else:
            worst = next(item for item, size in zip(held, largest, strict=True) if not bool(size.isfinite()))
            found = f"the gradient of {self._job.parameter_name(worst)}"
        raise StepError(
            expected=f"finite numbers in step {self.steps + 1} of job {self._job.name!r} (its call {self._calls})",
            found=f"{found} is not finite" if not found.startswith("a loss") else found,
            fix="look at this call's batch, lower the learning rate, or clip the gradient; no step has been made, "
            "parameters and optimizer are as they were",
            where=self._job.line,
        )


def require_known_parameters(job: JobDefinition) -> None:
    """Refuse an optimizer of parameters that are in none of the job's modules."""
    known = {id(parameter) for module in job.modules.values() for parameter in module.parameters()}
    for parameter in job.optimized_parameters():
        if id(parameter) not in known:
            raise ConfigError(
                expected="an optimizer of the parameters of the modules given as model=",
                found=f"a parameter of shape {list(parameter.shape)} that is in none of them",
                fix="pass its module too: model=[model, other]",
            )


def group_sizes(job: JobDefinition) -> list[Any]:
    """How many parameters each group has: what changes when a script adds a group later."""
    return [len(group["params"]) for optimizer in job.optimizers for group in optimizer.param_groups]

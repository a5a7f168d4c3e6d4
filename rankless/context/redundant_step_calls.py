"""Find calls of a plain training loop that a script has kept beside its jobs: backward, clipping, steps, GradScaler.

Note [leftover calls]: a call of a train job computes gradients and makes the step, so the old loop's calls after it are
wrong. A second `optimizer.step()` applies the same gradients twice, clipping comes too late, and `backward()` has
nothing to do. A job remembers the `.grad` of its parameters after each call. A step of its optimizer, or a clipping,
that finds these same tensors raises, unless the script has made gradients of its own since: if `.grad` is another
tensor, or if `backward` found it changed in place, as after `zero_grad(set_to_none=False)`. Other optimizers may step
at any time. docs/decisions/0022-leftover-calls.md gives the reasons.
"""

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from operator import attrgetter, is_
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from rankless.errors import StepError
from rankless.user_code import script_line

INSTALLED = "rankless_leftover_calls"
"""The attribute of a patched function that holds references to the monitors that it informs, the latest first."""
CLIPPING = {"_clip_grads_with_norm_": ("clip_norm", "max_norm"), "clip_grad_value_": ("clip_value", "clip_value")}
"""PyTorch's functions that clip gradients: the option of a job that does the same, and their variable of the limit."""

_get_gradient, _get_version = attrgetter("grad"), attrgetter("_version")


@dataclass(frozen=True)
class JobLabel:
    """What the errors say of a job."""

    name: str
    line: str
    trains: bool

    def __str__(self) -> str:
        return f"job {self.name!r} ({self.line})"


@dataclass(frozen=True)
class UsedGradients:
    """The gradients that the latest call of a train job has computed and used, by parameter."""

    job: JobLabel
    parameters: Sequence[Tensor]
    gradients: Sequence[Tensor]
    versions: Sequence[int]
    stepped: Callable[[], Iterable[Tensor]]
    """Returns the parameters that the job's optimizers step."""

    @classmethod
    def of(
        cls, job: JobLabel, parameters: Iterable[Tensor], stepped: Callable[[], Iterable[Tensor]]
    ) -> "UsedGradients":
        """Return the gradients that parameters have now."""
        items = list(parameters)
        gradients = list(map(_get_gradient, items))
        if any(map(is_, gradients, repeat(None))):
            items = [item for item, gradient in zip(items, gradients, strict=True) if gradient is not None]
            gradients = list(map(_get_gradient, items))
        return cls(job, items, gradients, list(map(_get_version, gradients)), stepped)

    def select(self, is_kept: Callable[[Tensor, Tensor, int], bool]) -> "UsedGradients":
        """Return those for whose parameter, gradient and version the condition holds."""
        triples = zip(self.parameters, self.gradients, self.versions, strict=True)
        kept = [triple for triple in triples if is_kept(*triple)]
        return replace(
            self,
            parameters=[parameter for parameter, _, _ in kept],
            gradients=[gradient for _, gradient, _ in kept],
            versions=[version for _, _, version in kept],
        )

    def current(self) -> "UsedGradients":
        """Return those that are still `.grad` of their parameters."""
        return self.select(lambda parameter, gradient, _: parameter.grad is gradient)

    def unchanged(self) -> "UsedGradients":
        """Return those that are still `.grad` of their parameters, with the job's values."""
        return self.select(
            lambda parameter, gradient, version: parameter.grad is gradient and gradient._version == version
        )


class StepHook:
    """A hook of each optimizer of a job, from the job's definition on. It checks steps from its first call on.

    Args:
        job: The job. The hook does not keep it alive: the optimizer may live longer.
    """

    def __init__(self, job: object) -> None:
        self._job_reference: ref[object] | None = ref(job)
        self.leftovers: LeftoverCalls | None = None

    @property
    def job(self) -> Any:
        """The job; None if it is gone, and in a copy of the hook."""
        return None if self._job_reference is None else self._job_reference()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has, which is no hook of an optimizer."""
        return {**self.__dict__, "_job_reference": None}

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise `StepError` if a step, which begins now, is a leftover."""
        has_closure = len(args) > 1 or kwargs.get("closure") is not None  # it computes gradients of its own
        if self.leftovers is not None and not has_closure:
            self.leftovers.check_step(optimizer, sys._getframe(1))


class LeftoverCalls:
    """The gradients that the jobs of a process have used, and the checks of the script's own calls."""

    def __init__(self) -> None:
        self._used: dict[JobLabel, UsedGradients] = {}
        self._job: JobLabel | None = None
        self._in_job = False
        self.train_calls = 0
        """How many calls of train jobs there have been."""

    @property
    def has_trained(self) -> bool:
        """Whether a train job has been called."""
        return self._job is not None and self._job.trains

    def begin_call(self, job: JobLabel) -> None:
        """Note a call of a job, and observe the script's own calls from the first one on."""
        if self._job is None:
            observe(torch.autograd, "backward", LeftoverCalls._on_backward, self)
            observe(clip_grad, "_group_tensors_by_device_and_dtype", LeftoverCalls._on_clipping, self)
            for name in ("unscale_", "step", "update"):
                observe(torch.amp.GradScaler, name, LeftoverCalls._on_grad_scaler, self)
        self.train_calls += job.trains
        if job.trains or not self.has_trained:
            self._job = job
        known = self._used.pop(job, None)
        if known is not None and self._used:
            # The job replaces these gradients. Their memory must be free while it computes the new ones.
            replaced = {id(item) for item in known.parameters}
            self._keep(lambda parameter, _gradient, _version: id(parameter) not in replaced)

    @contextlib.contextmanager
    def inside_job(self) -> Iterator[None]:
        """Within the context, calls belong to a job."""
        before, self._in_job = self._in_job, True
        try:
            yield
        finally:
            self._in_job = before

    def end_call(self, job: JobLabel, parameters: Iterable[Tensor], stepped: Callable[[], Iterable[Tensor]]) -> None:
        """Remember the gradients that a call of a train job has used; `stepped` returns the parameters that step."""
        self._used[job] = UsedGradients.of(job, parameters, stepped)

    def check_step(self, optimizer: Optimizer, frame: FrameType) -> None:
        """Raise `StepError` if an optimizer of a job steps, outside jobs, with gradients that a job has used."""
        job = None if self._in_job else self._find_job_of(optimizer)
        if job is not None:
            raise StepError(
                expected=f"one step for each call of {job}, which makes it",
                found="optimizer.step() after the call, with the gradients that the job has used",
                fix="delete this line; for a step of your own, call zero_grad() and backward() before it",
                where=script_line(frame),
            )

    def _find_job_of(self, optimizer: Optimizer) -> JobLabel | None:
        """Return the job whose gradients an optimizer would step with; None if they are the script's own."""
        if not self._used:
            return None
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for used in self._used.values():
            if any(id(parameter) in stepped for parameter in used.current().parameters):
                return used.job
        return None

    def _keep(self, is_kept: Callable[[Tensor, Tensor, int], bool]) -> None:
        """Forget the gradients for which the condition does not hold."""
        self._used = {job: used.select(is_kept) for job, used in self._used.items()}

    def _on_backward(self, frame: FrameType, tensors: Any, *_args: Any, **_kwargs: Any) -> None:
        """Raise for a tensor without gradients, instead of PyTorch; otherwise forget the gradients it adds to."""
        if self._in_job:
            return
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if self._job is not None and not any(isinstance(item, Tensor) and item.requires_grad for item in roots):
            delete = "delete this line: the call computes the gradients and makes the step"
            raise StepError(
                expected="backward() of a tensor that depends on parameters",
                found=f"a tensor without gradients, after a call of {self._job}, whose results have none",
                fix=delete if self._job.trains else f"pass optimizer= to rankless.job, and {delete}",
                where=script_line(frame),
            )
        # If the script has cleared a gradient, what backward now adds is the script's own.
        self._used = {job: used.unchanged() for job, used in self._used.items()}

    def _on_clipping(self, frame: FrameType, tensors: Any, *_args: Any, **_kwargs: Any) -> None:
        """Raise `StepError` if a job has used all gradients that are clipped. An infinite limit only measures them.

        All functions that clip call the observed function of PyTorch, under whatever name the script has them.
        """
        option, name = CLIPPING.get(frame.f_code.co_name, ("", ""))
        limit, gradients = frame.f_locals.get(name), tensors[0]
        if self._in_job or limit is None or math.isinf(limit) or not gradients:
            return
        jobs: dict[int, JobLabel] = {}
        for used in self._used.values():
            stepped = {id(parameter) for parameter in used.stepped()}
            current = used.current()
            pairs = zip(current.parameters, current.gradients, strict=True)
            jobs |= {id(gradient): used.job for parameter, gradient in pairs if id(parameter) in stepped}
        if all(id(gradient) in jobs for gradient in gradients):
            raise StepError(
                expected=f"gradients clipped before the step, which each call of {jobs[id(gradients[0])]} makes",
                found="gradients clipped after the call, which changes nothing",
                fix=f"delete this line, and pass {option}={float(limit):g} to rankless.job; gradient_norm=True "
                "measures the norm",
                where=script_line(frame),
            )

    def _on_grad_scaler(
        self, frame: FrameType, scaler: Any, optimizer: Any = None, *_args: Any, **_kwargs: Any
    ) -> None:
        """Raise `StepError` for a `GradScaler` that steps with a job's gradients, or that has scaled no loss."""
        if self._job is None or self._in_job:
            return
        if isinstance(optimizer, Optimizer):
            is_leftover = self._find_job_of(optimizer) is not None
        else:
            is_leftover = scaler.is_enabled() and scaler._scale is None  # PyTorch refuses it too
        if is_leftover:
            raise StepError(
                expected=f"no GradScaler beside {self._job}, which makes its step without one",
                found="a call of a GradScaler after the job's call",
                fix="delete the lines of the scaler; in a job use torch.autocast with bfloat16, which needs none",
                where=script_line(frame),
            )


def observe(owner: Any, name: str, check: Callable[..., None], leftovers: LeftoverCalls) -> None:
    """Call `check(leftovers, frame, …)` before each call of a function of PyTorch, as long as `leftovers` lives.

    The first call patches the function. Later ones only add their `leftovers` to those that the patch informs.
    """
    original = vars(owner)[name]
    known: list[ref[LeftoverCalls]] | None = getattr(original, INSTALLED, None)
    if known is not None:
        known[:] = [ref(leftovers), *(other for other in known if other() is not None)]
        return
    monitors = [ref(leftovers)]

    @functools.wraps(original)
    def observed(*args: Any, **kwargs: Any) -> Any:
        for monitor in monitors:
            living = monitor()
            if living is not None:
                check(living, sys._getframe(1), *args, **kwargs)
        return original(*args, **kwargs)

    setattr(observed, INSTALLED, monitors)
    setattr(owner, name, observed)

"""Refuse training calls inside a job (backward, clipping, optimizer steps): Rankless makes them after the job."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rankless.errors import CaptureError
from rankless.user_code import user_line

GRADIENT_CLIPPING = (
    "clipping gradients",
    "pass clip_norm= or clip_value= to rankless.job: Rankless computes the gradients after the job",
)
BACKWARD = (
    "backward()",
    "return the loss and remove backward(); use torch.autograd.grad for gradients that the loss needs",
)
SCHEDULER_STEP = (
    "a scheduler's step()",
    "call scheduler.step() after the job: inside, it would run during capture only",
)
LOSS_SCALING = (
    "a GradScaler's scale()",
    "remove the scaler and return the loss itself: autocast to bfloat16 needs none",
)
OPTIMIZER_STEP = (
    "an optimizer's step()",
    "remove it: each call of a job with optimizer= makes the step",
)
RETURN_LOSS = "return the loss, or remove optimizer= if the job only predicts"
REFUSED_WITHOUT_CAPTURE = frozenset(
    {RETURN_LOSS, *(fix for _, fix in (GRADIENT_CLIPPING, BACKWARD, SCHEDULER_STEP, LOSS_SCALING, OPTIMIZER_STEP))}
)
"""Fixes of what a job may not do with `capture=False` either."""


@contextlib.contextmanager
def refuse_training_calls() -> Iterator[None]:
    """Within the context, backward, clipping, loss scaling and optimizer or scheduler steps raise `CaptureError`.

    The error carries their line.
    """
    refused_methods: list[tuple[Any, str, tuple[str, str]]] = [
        (Tensor, "backward", BACKWARD),
        (torch.autograd, "backward", BACKWARD),
        (LRScheduler, "step", SCHEDULER_STEP),
        (ReduceLROnPlateau, "step", SCHEDULER_STEP),
        # An enabled scaler's `scale` calls this.
        (torch.amp.GradScaler, "_lazy_init_scale_growth_tracker", LOSS_SCALING),
        # Both kinds of clipping call these, whatever name the script imports them by.
        (clip_grad, "_get_total_norm", GRADIENT_CLIPPING),
        (clip_grad, "_group_tensors_by_device_and_dtype", GRADIENT_CLIPPING),
    ]
    originals = [(owner, name, vars(owner)[name]) for owner, name, _ in refused_methods]
    hook = register_optimizer_step_pre_hook(lambda *_: raise_refusal(OPTIMIZER_STEP))
    for owner, name, reason in refused_methods:
        setattr(owner, name, make_refusing_function(vars(owner)[name], reason))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
        hook.remove()


def make_refusing_function(original: Callable[..., Any], reason: tuple[str, str]) -> Callable[..., Any]:
    """Return a replacement for a function that raises with the reason why the job may not call it."""

    @functools.wraps(original)
    def refusing_function(*_args: Any, **_kwargs: Any) -> Any:
        raise_refusal(reason)

    return refusing_function


def raise_refusal(reason: tuple[str, str]) -> None:
    """Raise `CaptureError` for a training call in a job."""
    call, fix = reason
    raise CaptureError(
        expected="a job that computes its results and leaves the rest of the step to Rankless",
        found=f"{call} inside the job",
        fix=fix,
        where=user_line(sys._getframe(1)),
    )

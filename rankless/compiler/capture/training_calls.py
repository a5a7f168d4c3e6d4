"""Parts of a training step that a job may not do itself: the system does them, after the job has returned."""

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
    "pass clip_norm= or clip_value= to rankless.job: the gradients are made after the job",
)
BACKWARD = (
    "backward()",
    "return the loss and leave backward() away; torch.autograd.grad for gradients that the loss needs",
)
SCHEDULER_STEP = ("a scheduler's step()", "call scheduler.step() after the job: inside it would happen at capture only")
LOSS_SCALING = (
    "a GradScaler's scale()",
    "leave the scaler away and return the loss itself: autocast to bfloat16 needs none",
)
OPTIMIZER_STEP = (
    "an optimizer's step()",
    "leave it away: each call of the job makes it, or pass optimizer= to rankless.job",
)


@contextlib.contextmanager
def refuse_training_calls() -> Iterator[None]:
    """Within, backward, clipping, scaling, steps of optimizers and schedulers raise `CaptureError` with their line."""
    wanted: list[tuple[Any, str, tuple[str, str]]] = [
        (Tensor, "backward", BACKWARD),
        (torch.autograd, "backward", BACKWARD),
        (LRScheduler, "step", SCHEDULER_STEP),
        (ReduceLROnPlateau, "step", SCHEDULER_STEP),
        # Asked by `scale` of a scaler that is enabled.
        (torch.amp.GradScaler, "_lazy_init_scale_growth_tracker", LOSS_SCALING),
        # Asked by both kinds of clipping, whatever name the script has imported them by.
        (clip_grad, "_get_total_norm", GRADIENT_CLIPPING),
        (clip_grad, "_group_tensors_by_device_and_dtype", GRADIENT_CLIPPING),
    ]
    originals = [(owner, name, vars(owner)[name]) for owner, name, _ in wanted]
    hook = register_optimizer_step_pre_hook(lambda *_: raise_refusal(OPTIMIZER_STEP))
    for owner, name, why in wanted:
        setattr(owner, name, make_refusing_function(vars(owner)[name], why))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
        hook.remove()


def make_refusing_function(original: Callable[..., Any], why: tuple[str, str]) -> Callable[..., Any]:
    """In the place of a function: what says why it cannot be called."""

    @functools.wraps(original)
    def called(*_args: Any, **_kwargs: Any) -> Any:
        raise_refusal(why)

    return called


def raise_refusal(why: tuple[str, str]) -> None:
    """Raise for a part of the step."""
    what, fix = why
    raise CaptureError(
        expected="a job that computes its results and leaves the rest of the step to the system",
        found=f"{what} inside the job",
        fix=fix,
        where=user_line(sys._getframe(1)),
    )

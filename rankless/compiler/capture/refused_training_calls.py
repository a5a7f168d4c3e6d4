"""Calls that a job must not make: of the training step, and changes of tensors that a capture does not see.

Rankless makes the training calls (backward, clipping, optimizer steps) after the job. A captured job refuses them, and
changes of memory; on one device it warns of the latter.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rankless.compiler.tracing.refused_tensor_functions import GET_DATA, SET_DATA, ModuleTensors, refuse_set_data
from rankless.compiler.tracing.replaced_attributes import make_refusing_function, replace_attributes
from rankless.errors import CaptureError
from rankless.user_code import is_user_code, user_line

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

    def refuse_step(*_: Any) -> None:
        raise refuse_training_call(OPTIMIZER_STEP, sys._getframe(1))

    replaced = [
        (owner, name, make_refusing_function(vars(owner)[name], refuse_always, partial(refuse_training_call, reason)))
        for owner, name, reason in refused_methods
    ]
    with replace_attributes(*replaced):
        hook = register_optimizer_step_pre_hook(refuse_step)
        try:
            yield
        finally:
            hook.remove()


def refuse_always(_file: str) -> bool:
    """Return that a call is refused in whatever file it stands."""
    return True


def refuse_training_call(reason: tuple[str, str], frame: FrameType) -> CaptureError:
    """Return the error for a training call in a job."""
    call, fix = reason
    return CaptureError(
        expected="a job that computes its results and leaves the rest of the step to Rankless",
        found=f"{call} inside the job",
        fix=fix,
        where=user_line(frame),
    )


@contextlib.contextmanager
def refuse_untraced_changes() -> Iterator[None]:
    """Within the context, `torch.utils.swap_tensors` and the user's calls of `Tensor.set_` raise `CaptureError`."""
    swap, set_memory = torch.utils.swap_tensors, torch.Tensor.set_
    with replace_attributes(
        (torch.utils, "swap_tensors", make_refusing_function(swap, refuse_always, partial(refuse_change, swap))),
        # PyTorch's tracing calls `set_` too.
        (torch.Tensor, "set_", make_refusing_function(set_memory, is_user_code, partial(refuse_change, set_memory))),
    ):
        yield


def refuse_change(function: Callable[..., Any], frame: FrameType) -> CaptureError:
    """Return the error for a call of a function that gives a tensor other memory."""
    return CaptureError(
        expected="a job that gives no tensor other memory",
        found=f"{function.__name__}() inside the job",
        fix="change tensors in place with copy_(): buffers inside the job, parameters outside it",
        where=user_line(frame),
    )


@contextlib.contextmanager
def leave_recurrent_weights() -> Iterator[None]:
    """Within the context, recurrent layers on a GPU do not move their weights into one block of memory.

    PyTorch does it in a forward pass whose weights are other tensors than before, as those of a trace are.
    """
    with replace_attributes((nn.RNNBase, "flatten_parameters", lambda _: None)):
        yield


@contextlib.contextmanager
def warn_of_refused_changes(tensors: ModuleTensors, *, warn: Callable[[CaptureError, str], None]) -> Iterator[None]:
    """Within the context, call `warn` when the script sets `.data` of a tensor in a way that a captured job refuses.

    It costs time for each access of `.data`, so a job uses it at its first call only.

    Args:
        tensors: The job's parameters and buffers.
        warn: Receives the error that a capture raises, and the line of the script.
    """

    def get_data(tensor: Tensor) -> Tensor:
        data: Tensor = GET_DATA(tensor)
        tensors.add_data(tensor, data)
        return data

    def set_data(tensor: Tensor, value: Tensor) -> None:
        is_refused = not tensors.is_own_data(tensor, value) and not tensors.may_set_data(tensor, value)
        SET_DATA(tensor, value)
        if is_refused:
            warn(refuse_set_data(tensors.describe(tensor)), user_line(sys._getframe(1)))

    with replace_attributes((torch.Tensor, "data", property(get_data, set_data))):
        yield

"""Tells the participants of a run what a script's loop does: its loss, and the steps of its optimizers."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from rankless.context.step_events import StepEvents
from rankless.logical_view.call_observers import MoveReason
from rankless.logical_view.tensor import DividedTensor
from rankless.user_code import caller_line

LOSS = MoveReason("output", "the loss, for its progress")


class ScriptSteps:
    """The steps of a script, which participants hear of as those of one job.

    Args:
        events: The participants.
        count: Called after each "step" of an optimizer and after each "backward" pass.

    Attributes:
        name: What the job is called.
        line: The line of the last step.
        modules: Its models: none, because a script does not name them.
    """

    def __init__(self, events: StepEvents, count: Callable[[str], None]) -> None:
        self._events = events
        self._count = count
        self._loss: Tensor | None = None
        self.name = "script"
        self.line = ""
        self.modules: Mapping[str, nn.Module] = {}

    def watch(self) -> None:
        """Hear of backward passes and of steps of optimizers, until this process ends."""
        backward = torch.autograd.backward

        def backward_with_loss(tensors: Any, *args: Any, **kwargs: Any) -> None:
            backward(tensors, *args, **kwargs)
            root = tensors if isinstance(tensors, Tensor) else next(iter(tensors), None)
            if root is not None and root.numel() == 1:
                # All ranks are here. Most scripts read the loss, which the tensor keeps from now on.
                with torch.no_grad():
                    self._loss = root.whole(LOSS) if isinstance(root, DividedTensor) else root.detach()
            self._count("backward")

        torch.autograd.backward = backward_with_loss
        register_optimizer_step_post_hook(lambda *_: self._end_step())

    def _end_step(self) -> None:
        self._count("step")
        if self._loss is None:
            return
        self.line = caller_line()
        self._events.begin_call(self)
        self._events.end_call(self, None, self._loss)
        self._events.end_step(self)

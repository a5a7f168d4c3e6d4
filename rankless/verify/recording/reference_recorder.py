"""A plain script, recorded without its help: `rankless verify --against plain.py`.

# Note [watching a plain script]: it has no jobs, so PyTorch's own doors are watched. The first forward of an outermost
# module makes a model known, before anything has changed it; a call of `backward` tells the losses; the end of an
# optimizer's step tells the gradients it has used and the parameters it has made. Nothing is drawn and nothing changed,
# so the script trains as it would alone. What belongs to what is settled afterwards, by names, sizes and first values
# (`verify.reference_run`).
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from rankless.jobs.precision import cast
from rankless.user_code import user_line
from rankless.verify.recording.recorder import RunRecorder


class ReferenceRecorder:
    """Records the optimizers' steps of this process, from when it is started."""

    def __init__(self, recorder: RunRecorder, *, step_made: Callable[[], None], dtype: torch.dtype | None) -> None:
        self._recorder = recorder
        self._step_made = step_made
        self._dtype = dtype
        self._module_stack: list[nn.Module] = []
        self._models: list[nn.Module] = []
        self._names: dict[int, str] = {}
        self._losses: list[Tensor] = []
        self._line = ""

    def start(self) -> None:
        """Watch forwards, backwards and optimizers' steps until the process ends."""
        register_module_forward_pre_hook(self._before_forward)  # type: ignore[arg-type]  # it may give new arguments
        register_module_forward_hook(self._after_forward, always_call=True)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        backward = torch.autograd.backward

        def watched(tensors: Any, *args: Any, **kwargs: Any) -> None:
            roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            self._losses += [root.detach().clone() for root in roots]
            self._line = user_line(sys._getframe(1))
            backward(tensors, *args, **kwargs)

        _set_backward(torch.autograd, watched)

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        outermost = not self._module_stack
        self._module_stack.append(module)
        if not outermost:
            return None
        self._register_model(module)
        if self._dtype is None:
            return None
        dtype = self._dtype
        return tuple(cast(item, dtype) if isinstance(item, Tensor) else item for item in args)

    def _after_forward(self, _module: nn.Module, _args: Any, _result: Any) -> None:
        self._module_stack.pop()

    def _register_model(self, module: nn.Module) -> None:
        """Make a model known, unless all of it is."""
        strangers = [item for item in module.parameters() if id(item) not in self._names]
        if not strangers:
            return
        if self._dtype is not None:
            dtype = self._dtype
            module._apply(lambda tensor: cast(tensor, dtype))
        name = self._recorder.register("model", module)
        self._models.append(module)
        for path, tensor in module.named_parameters():
            self._names.setdefault(id(tensor), f"{name}.{path}")

    def _before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Parameters that no module holds become known before their first step."""
        alone = [item for item in _parameters(optimizer) if id(item) not in self._names]
        if alone:
            name = self._recorder.register("alone", nn.ParameterList(alone))
            self._names.update({id(item): f"{name}.{place}" for place, item in enumerate(alone)})

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        parameters = _parameters(optimizer)
        ours = {id(item) for item in parameters}
        tensors = {self._names[id(item)]: item for item in parameters}
        for module in self._models:
            if any(id(item) in ours for item in module.parameters()):
                prefix = next(self._names[id(item)] for item in module.parameters()).partition(".")[0]
                tensors |= {f"{prefix}.{path}": buffer for path, buffer in module.named_buffers()}
        self._recorder.record_call(job="step", line=self._line, results=self._losses)
        self._losses = []
        self._recorder.record_tensors(job="step", tensors=tensors)
        self._step_made()


def _parameters(optimizer: Optimizer) -> Sequence[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _set_backward(module: Any, function: Callable[..., None]) -> None:
    module.backward = function

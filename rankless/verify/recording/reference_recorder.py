"""Record a plain script that calls no job: `rankless verify --against plain.py`.

Note [recording a plain script]: PyTorch's hooks observe the script. The first forward of an outermost module registers
the model before anything changes it. A call of `backward` provides the losses. The end of an optimizer step provides
the gradients it used and the parameters it produced. The hooks draw and change nothing, so the script trains as it does
alone. `verify.reference_run` later matches its tensors with the script's by name, size and first value.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from rankless.jobs.dtype_override import cast
from rankless.user_code import user_line
from rankless.verify.recording.recorder import RunRecorder


class ReferenceRecorder:
    """Records the optimizer steps of this process from `start` on."""

    def __init__(self, recorder: RunRecorder, *, on_step: Callable[[], None], dtype: torch.dtype | None) -> None:
        self._recorder = recorder
        self._on_step = on_step
        self._dtype = dtype
        self._module_stack: list[nn.Module] = []
        self._models: list[nn.Module] = []
        self._names: dict[int, str] = {}
        self._losses: list[Tensor] = []
        self._line = ""

    def start(self) -> None:
        """Hook forwards, backwards and optimizer steps until the process ends."""
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
        """Register a model unless all its parameters are known."""
        unknown = [item for item in module.parameters() if id(item) not in self._names]
        if not unknown:
            return
        if self._dtype is not None:
            dtype = self._dtype
            module._apply(lambda tensor: cast(tensor, dtype))
        name = self._recorder.register("model", module)
        self._models.append(module)
        for path, tensor in module.named_parameters():
            self._names.setdefault(id(tensor), f"{name}.{path}")

    def _before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Register parameters without a module before their first step."""
        unowned = [item for item in _list_parameters(optimizer) if id(item) not in self._names]
        if unowned:
            name = self._recorder.register("alone", nn.ParameterList(unowned))
            self._names.update({id(item): f"{name}.{index}" for index, item in enumerate(unowned)})

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        parameters = _list_parameters(optimizer)
        ours = {id(item) for item in parameters}
        tensors = {self._names[id(item)]: item for item in parameters}
        for module in self._models:
            if any(id(item) in ours for item in module.parameters()):
                prefix = next(self._names[id(item)] for item in module.parameters()).partition(".")[0]
                tensors |= {f"{prefix}.{path}": buffer for path, buffer in module.named_buffers()}
        self._recorder.record_call(job="step", line=self._line, results=self._losses)
        self._losses = []
        self._recorder.record_tensors(job="step", tensors=tensors)
        self._on_step()


def _list_parameters(optimizer: Optimizer) -> Sequence[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _set_backward(module: Any, function: Callable[..., None]) -> None:
    module.backward = function

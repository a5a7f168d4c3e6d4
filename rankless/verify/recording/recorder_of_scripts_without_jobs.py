"""Record a script that calls no job, from outside: a plain script, or one of DDP or another framework.

Note [recording from outside]: PyTorch's hooks observe the script. The first forward of an outermost module registers
the model before anything changes it. A call of `backward` provides the losses. The end of an optimizer step provides
the gradients it used and the parameters it produced. The hooks draw and change nothing, so the script trains as it does
alone. Wrappers such as DistributedDataParallel are looked through, so that a tensor has one name with and without them.
What each rank puts into a step is recorded as digests of its rows, from which `verify.causes` finds out how the ranks
divide the data. `verify.comparison_with_reference_script` matches the tensors of two different scripts by name, size
and first value.
"""

import atexit
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as groups
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from rankless.config.process_configs import WorkerConfig
from rankless.context.step_events import StepLimit
from rankless.jobs.dtype_override import cast
from rankless.jobs.last_bit_perturbation import perturb_gradients, perturbed_parameters
from rankless.records.verify_recording_format import ScriptSurvey
from rankless.user_code import script_line, user_line
from rankless.verify.recording.input_digests import InputDigests
from rankless.verify.recording.run_recorder import RunRecorder

WRAPPED = ("module", "_forward_module", "_orig_mod")
"""The attributes under which DistributedDataParallel, Fabric and torch.compile keep the model that they wrap."""


class ReferenceRecorder:
    """Records the optimizer steps of this process from `start` on.

    With `noise`, gradients and the parameters of forward and backward are perturbed in their last bits.
    """

    def __init__(
        self,
        recorder: RunRecorder,
        *,
        on_step: Callable[[], None],
        dtype: torch.dtype | None,
        noise: torch.Generator | None = None,
        is_logical: bool = False,
    ) -> None:
        self._is_logical = is_logical  # then every rank has every row
        self._recorder = recorder
        self._on_step = on_step
        self._dtype = dtype
        self._noise = noise
        self._perturbed = contextlib.ExitStack()
        self._is_perturbed = False
        self._module_stack: list[nn.Module] = []
        self._models: list[nn.Module] = []
        self._names: dict[int, str] = {}
        self._losses: list[Tensor] = []
        self._inputs = InputDigests()
        self._line = ""
        self._steps_in_progress = 0

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
            frame = sys._getframe(1)
            self._line = script_line(frame) or user_line(frame)
            backward(tensors, *args, **kwargs)

        _set_backward(torch.autograd, watched)

    def list_layers(self) -> tuple[str, ...]:
        """Return the kinds of layers of the models that have trained."""
        return tuple(sorted({type(part).__name__ for model in self._models for part in model.modules()}))

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        outermost = not self._module_stack
        self._module_stack.append(module)
        if outermost:
            is_training = torch.is_grad_enabled() and module.training
            self._inputs.begin_call(is_training=is_training and not self._is_logical)
        self._inputs.offer(args)
        if not outermost:
            return None
        self._register_model(module)
        if self._noise is not None and torch.is_grad_enabled() and not self._is_perturbed:
            self._is_perturbed = True
            self._perturbed.enter_context(perturbed_parameters(self._list_known_parameters(), self._noise))
        if self._dtype is None:
            return None
        dtype = self._dtype
        return tuple(cast(item, dtype) if isinstance(item, Tensor) else item for item in args)

    def _after_forward(self, _module: nn.Module, _args: Any, _result: Any) -> None:
        self._module_stack.pop()

    def _register_model(self, module: nn.Module) -> None:
        """Register a model unless all its parameters are known."""
        module = unwrap(module)
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

    def _list_known_parameters(self) -> Iterator[Tensor]:
        for model in self._models:
            yield from model.parameters()

    def _before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Register parameters without a module before their first step. A step may call another optimizer's step."""
        self._steps_in_progress += 1
        if self._steps_in_progress > 1:
            return
        if self._noise is not None:
            self._perturbed.close()
            self._is_perturbed = False
            perturb_gradients([item.grad for item in _list_parameters(optimizer) if item.grad is not None], self._noise)
        unowned = [item for item in _list_parameters(optimizer) if id(item) not in self._names]
        if unowned:
            name = self._recorder.register("alone", nn.ParameterList(unowned))
            self._names.update({id(item): f"{name}.{index}" for index, item in enumerate(unowned)})

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._steps_in_progress -= 1
        if self._steps_in_progress > 0:
            return
        parameters = _list_parameters(optimizer)
        ours = {id(item) for item in parameters}
        tensors = {self._names[id(item)]: item for item in parameters}
        for module in self._models:
            if any(id(item) in ours for item in module.parameters()):
                prefix = next(self._names[id(item)] for item in module.parameters()).partition(".")[0]
                tensors |= {f"{prefix}.{path}": buffer for path, buffer in module.named_buffers()}
        losses = self._losses
        named = {"loss": losses[0]} if len(losses) == 1 else {f"loss {n}": loss for n, loss in enumerate(losses, 1)}
        self._recorder.record_call(job="backward", line=self._line, results=named)
        self._losses = []
        rates = tuple(float(group["lr"]) for group in optimizer.param_groups if "lr" in group)
        inputs = self._inputs.take(learning_rates=rates)
        self._recorder.record_tensors(job="backward", tensors=tensors, inputs=inputs)
        self._on_step()


def unwrap(module: nn.Module) -> nn.Module:
    """Return the model inside wrappers that add no parameters and no buffers of their own."""
    for name in WRAPPED:
        inner = module._modules.get(name)
        if inner is not None and _get_tensor_ids(inner) == _get_tensor_ids(module):
            return unwrap(inner)
    return module


def _get_tensor_ids(module: nn.Module) -> set[int]:
    return {id(tensor) for tensor in (*module.parameters(), *module.buffers())}


def _list_parameters(optimizer: Optimizer) -> Sequence[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _set_backward(module: Any, function: Callable[..., None]) -> None:
    module.backward = function


def record_reference_run(config: WorkerConfig) -> None:
    """Record the training of this process from now on, until the process ends."""
    assert config.recording is not None
    limit, seed = config.observation.stop_after_steps, config.perturbation_seed
    recorder = RunRecorder(
        config.recording, config.rank, survey=lambda _models: ScriptSurvey(layers=reference.list_layers())
    )
    steps = None if limit is None else StepLimit(limit, at_end=lambda: recorder.finish(stopped=True))
    reference = ReferenceRecorder(
        recorder,
        on_step=lambda: None if steps is None else steps.count_step(),
        dtype=None if config.dtype is None else getattr(torch, config.dtype),
        noise=None if seed is None else torch.Generator().manual_seed(seed),
        is_logical=config.is_logical,
    )
    reference.start()
    if dist.is_available():
        _gather_before_destruction(recorder)
    atexit.register(recorder.finish)


def _gather_before_destruction(recorder: RunRecorder) -> None:
    """Let a script that destroys its process group leave its distributed tensors to the recorder before."""
    destroy = dist.destroy_process_group

    @functools.wraps(destroy)
    def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
        if sys.exc_info()[1] is None:  # other ranks may not come here after an error
            recorder.gather_distributed_tensors()
        destroy(group)

    dist.destroy_process_group = groups.destroy_process_group = destroy_process_group

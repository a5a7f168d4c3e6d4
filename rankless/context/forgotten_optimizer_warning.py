"""Find a job without an optimizer that was meant to train: a forgotten `optimizer=` trains nothing, silently."""

import gc
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rankless.context.redundant_step_calls import JobLabel, StepHook
from rankless.context.world import World


class MissingOptimizerCheck:
    """Checks a job at its second call. A script may call it once before it trains, to measure the first loss."""

    def __init__(self, job: JobLabel, modules: Mapping[str, nn.Module]) -> None:
        self._job = job
        self._modules = modules
        self._calls = 0

    def count_call(self, result: Any, world: World) -> None:
        """Count a call of the job, and at the second one warn if the job was meant to train."""
        self._calls += 1
        if (
            self._calls != 2
            or world.script.leftovers.has_trained
            or not was_meant_to_train(self._modules.values(), result)
        ):
            return
        world.notify(
            f"{self._job.line}: job {self._job.name!r} has no optimizer=, so it computes no gradients and trains "
            "nothing; pass optimizer= to rankless.job (or call model.eval() first, if the job only measures)"
        )


def was_meant_to_train(modules: Iterable[nn.Module], result: Any) -> bool:
    """Return whether a predict job looks like a train job whose optimizer was forgotten.

    It does if it returns a loss, its models are in training mode and have no gradients, and the script has an optimizer
    for their parameters that it gave to no job.
    """
    loss = result
    if isinstance(result, Mapping):
        loss = result.get("loss")
    elif isinstance(result, tuple | list) and result:
        loss = result[0]
    if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point() or not torch.is_grad_enabled():
        return False
    models = list(modules)
    parameters = [item for module in models for item in module.parameters() if item.requires_grad]
    if not any(module.training for module in models) or any(item.grad is not None for item in parameters):
        return False
    return any(is_unused_optimizer(thing, parameters) for thing in gc.get_objects())


def is_unused_optimizer(thing: object, parameters: Iterable[Tensor]) -> bool:
    """Return whether an object is an optimizer of some of the parameters, and no job has it."""
    # type(thing), not thing.__class__, which may run code of the script.
    if not issubclass(type(thing), Optimizer) or not isinstance(thing, Optimizer):
        return False
    if any(isinstance(hook, StepHook) for hook in thing._optimizer_step_pre_hooks.values()):
        return False
    stepped = {id(item) for group in thing.param_groups for item in group["params"]}
    return any(id(item) in stepped for item in parameters)

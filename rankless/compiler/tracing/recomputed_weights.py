"""Weights that PyTorch computes before each forward: old-style `weight_norm` and `spectral_norm`, and pruning.

Note [recomputed weights]: a hook of the module sets such a weight as a plain attribute. In a trace that would leave a
traced value there. So the attribute is absent while a job is traced, it is no value that the job reads, and the caller
computes it after each call, from the parameters and buffers that the call has used, as one device has it then.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

MISSING = object()


@dataclass(frozen=True)
class RecomputedWeight:
    """A weight of a module, the name of its attribute, and the function that computes it."""

    module: nn.Module
    name: str
    compute: Callable[[], Tensor]

    def refresh(self) -> None:
        """Set the attribute from the present parameters and buffers."""
        with torch.no_grad():
            setattr(self.module, self.name, self.compute())


def find_recomputed_weights(modules: Iterable[nn.Module]) -> Iterator[RecomputedWeight]:
    """Yield the recomputed weights of modules, without their submodules."""
    for module in modules:
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm):
                yield RecomputedWeight(module, hook.name, partial(hook.compute_weight, module))
            elif isinstance(hook, SpectralNorm):
                compute = partial(hook.compute_weight, module, do_power_iteration=False)
                yield RecomputedWeight(module, hook.name, compute)
            elif isinstance(hook, BasePruningMethod):
                yield RecomputedWeight(module, str(hook._tensor_name), partial(hook.apply_mask, module))


@contextlib.contextmanager
def without_recomputed_weights(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within the context, recomputed weights are absent until a hook sets them; afterwards they are as before."""
    weights = list(find_recomputed_weights(modules))
    before = [vars(weight.module).pop(weight.name, MISSING) for weight in weights]
    try:
        yield
    finally:
        for weight, value in zip(weights, before, strict=True):
            vars(weight.module).pop(weight.name, None)
            if value is not MISSING:
                vars(weight.module)[weight.name] = value

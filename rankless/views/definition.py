"""What a job is, before it runs anywhere."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True)
class JobDefinition:
    """A function, the modules it may use, and the optimizer that makes it a train job."""

    name: str
    function: Callable[..., Any]
    modules: Mapping[str, nn.Module]
    optimizer: Optimizer | None
    line: str
    check_every: int | None = None
    """Compare the models of all ranks before every so many calls; None: only when there is a reason."""

    @property
    def trains(self) -> bool:
        """Whether a call makes a training step."""
        return self.optimizer is not None

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of all modules, tied ones once, and the optimizer's that stand in a module no longer."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        everywhere = [
            *(module.parameters() for module in self.modules.values()),
            *(group["params"] for group in groups),
        ]
        return list({id(item): item for some in everywhere for item in some}.values())

    def device(self, default: torch.device) -> torch.device:
        """The device of the first parameter or buffer; `default` if there is none."""
        for module in self.modules.values():
            for tensor in itertools.chain(module.parameters(), module.buffers()):
                return tensor.device
        return default


def without_gradient(leaf: Any) -> Any:
    """A leaf of a result as the script gets it."""
    return leaf.detach() if isinstance(leaf, Tensor) else leaf

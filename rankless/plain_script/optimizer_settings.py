"""Notes the settings and the first parameters of a script's optimizers, which must be equal on all ranks.

They come from Python, so a rank that computes them from what differs between processes would train by other numbers,
and no gradient would show it.
"""

from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rankless.logical.agreement import RankAgreement

COMPARED = (bool, int, float, tuple, str)


class OptimizerSettings:
    """What each optimizer of a script has noted.

    Args:
        agreement: What the ranks compare.
    """

    def __init__(self, agreement: RankAgreement) -> None:
        self._agreement = agreement
        self._noted: WeakKeyDictionary[Optimizer, list[Any]] = WeakKeyDictionary()

    def watch(self) -> None:
        """Note the settings of each optimizer before it steps, until this process ends."""
        register_optimizer_step_pre_hook(lambda optimizer, *_: self._compare(optimizer))

    def _compare(self, optimizer: Optimizer) -> None:
        """Compare settings that have changed since the last step, and parameters that are new."""
        name = type(optimizer).__name__
        settings = [
            [(key, value) for key, value in group.items() if type(value) in COMPARED] + [len(group["params"])]
            for group in optimizer.param_groups
        ]
        noted = self._noted.get(optimizer)
        if noted == settings:
            return
        if noted is None or [group[-1] for group in noted] != [group[-1] for group in settings]:
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            for number, parameter in enumerate(parameters):
                if type(parameter) in (Tensor, Parameter):
                    self._agreement.note_tensor(parameter.detach().cpu(), f"parameter {number} of {name}, with digest")
        self._noted[optimizer] = settings
        self._agreement.note(settings, f"the settings of {name}")
        self._agreement.check(f"the first step of {name} with these settings")

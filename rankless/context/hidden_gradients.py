"""Parameters whose gradients a script does not find in `.grad`, because some job divides them between workers.

The same parameters are hidden on one device, where nothing is divided, so that a script behaves the same there.
"""

from collections.abc import Iterable

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


class HiddenGradients:
    """The parameters of jobs that divide gradients. Other jobs may train them too.

    Example:
        >>> import torch
        >>> hidden = HiddenGradients()
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> hidden.add([weight])
        >>> [item is weight for item in hidden.select([torch.ones(2), weight])]
        [True]
    """

    def __init__(self) -> None:
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Hide the gradients of parameters from now on."""
        for parameter in parameters:
            self._known[parameter] = True

    def select(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return those of some parameters whose gradients are hidden."""
        return [item for item in parameters if item in self._known] if len(self._known) else []

"""The one call of an autograd function, which PyTorch leaves without types."""

from typing import Any

from torch.autograd import Function


def apply_function(function: type[Function], *arguments: Any) -> Any:
    """What `forward` gives; `backward` is called when gradients are computed."""
    return function.apply(*arguments)

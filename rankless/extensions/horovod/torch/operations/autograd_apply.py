"""The only call of `autograd.Function.apply`, for which PyTorch has no types."""

from typing import Any

from torch.autograd import Function


def apply_function(function: type[Function], *arguments: Any) -> Any:
    """Call `forward` and return its result, so that autograd calls `backward`."""
    return function.apply(*arguments)

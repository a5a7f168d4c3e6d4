"""A reduction with its factors before and after it, and the division of an average."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rankless.extensions.horovod.engine.requests import ReduceOpCode

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)}  # fmt: skip

COMBINE_FUNCTIONS: dict[ReduceOpCode, Callable[..., Any]] = {
    ReduceOpCode.AVERAGE: torch.add,
    ReduceOpCode.SUM: torch.add,
    ReduceOpCode.MIN: torch.minimum,
    ReduceOpCode.MAX: torch.maximum,
    ReduceOpCode.PRODUCT: torch.mul,
}


@dataclass(frozen=True)
class ScaledReduction:
    """How the values of `size` ranks are reduced. All methods work in place and return their argument."""

    reduction: ReduceOpCode
    prescale: float
    postscale: float
    size: int

    @property
    def combine(self) -> Callable[..., Any]:
        """The function that combines two values."""
        return COMBINE_FUNCTIONS[self.reduction]

    def apply_prescale(self, tensor: torch.Tensor) -> torch.Tensor:
        """Scale one rank's values before they are combined with others."""
        return scale_in_place(tensor, self.prescale)

    def finish(self, tensor: torch.Tensor) -> torch.Tensor:
        """Divide the combined values for an average, and scale them."""
        if self.reduction is ReduceOpCode.AVERAGE:
            if tensor.dtype.is_floating_point:
                tensor.div_(self.size)
            elif tensor.dtype is not torch.bool:
                tensor.div_(self.size, rounding_mode="trunc")
        return scale_in_place(tensor, self.postscale)


def scale_in_place(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply the tensor by a factor. Integers are truncated toward zero."""
    if factor == 1.0:
        return tensor
    if tensor.dtype.is_floating_point:
        return tensor.mul_(factor)
    return tensor.copy_((tensor.double() * factor).trunc_())

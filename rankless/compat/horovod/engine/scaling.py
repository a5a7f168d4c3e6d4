"""A reduction with its factors before and after it, and the division of an average."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rankless.compat.horovod.engine.requests import Reduction

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)}  # fmt: skip

COMBINING: dict[Reduction, Callable[..., Any]] = {
    Reduction.AVERAGE: torch.add,
    Reduction.SUM: torch.add,
    Reduction.MIN: torch.minimum,
    Reduction.MAX: torch.maximum,
    Reduction.PRODUCT: torch.mul,
}


@dataclass(frozen=True)
class Reducing:
    """How the values of so many ranks are reduced. All but `combine` work in place and give what they got."""

    reduction: Reduction
    prescale: float
    postscale: float
    size: int

    @property
    def combine(self) -> Callable[..., Any]:
        """Two values into one."""
        return COMBINING[self.reduction]

    def before(self, tensor: torch.Tensor) -> torch.Tensor:
        """One rank's values, before they are combined with others."""
        return scaled(tensor, self.prescale)

    def after(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values of all, once they are combined: divided for an average, and scaled."""
        if self.reduction is Reduction.AVERAGE:
            if tensor.dtype.is_floating_point:
                tensor.div_(self.size)
            elif tensor.dtype is not torch.bool:
                tensor.div_(self.size, rounding_mode="trunc")
        return scaled(tensor, self.postscale)


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """The tensor times a factor, in place; integers are truncated toward zero."""
    if factor == 1.0:
        return tensor
    if tensor.dtype.is_floating_point:
        return tensor.mul_(factor)
    return tensor.copy_((tensor.double() * factor).trunc_())

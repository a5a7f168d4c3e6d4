"""Strides of results in half precision, as PyTorch's kernels give them.

PyTorch traces elementwise operators in half precision as if their arguments were first copied to float32. A copy of an
expanded tensor lies in memory in another order than the tensor, so a trace gives the result other strides than the
kernel, which copies nothing.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import wrappers

HALF_DTYPES = (torch.float16, torch.bfloat16)


class ElementwiseTypes:
    """PyTorch's functions on types, except that shapes and strides in half precision are computed in that dtype."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def elementwise_dtypes(self, *args: Any, **kwargs: Any) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtypes of an elementwise computation and of its result.

        Tensors on the meta device have no numbers: only the strides of their results count.
        """
        computed, result = self._original.elementwise_dtypes(*args, **kwargs)
        tensors = [item for item in args if isinstance(item, Tensor)]
        dtypes = {item.dtype for item in tensors}
        is_half = len(dtypes) == 1 and computed == torch.float32 and dtypes <= set(HALF_DTYPES)
        if is_half and all(item.is_meta for item in tensors):
            (computed,) = dtypes
        return computed, result


@contextlib.contextmanager
def trace_half_precision_layouts() -> Iterator[None]:
    """Within the context, traces give results in half precision the strides that kernels give them."""
    names = vars(wrappers)
    before = names["utils"]
    names["utils"] = ElementwiseTypes(before)
    try:
        yield
    finally:
        names["utils"] = before

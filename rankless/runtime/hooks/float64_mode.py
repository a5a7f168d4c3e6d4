"""Make a whole script compute in float64, also where it asks for another floating-point type.

Note [float64 runs]: `rankless verify` repeats runs in float64 when rounding could explain a difference. The default
dtype alone does not suffice: a script that writes `.float()`, `dtype=torch.bfloat16` or `torch.from_numpy(images)`
mixes types as soon as anything else is in float64, and fails. This mode replaces the types that a call asks for, and
widens tensors where they enter from outside of PyTorch. Autocast leaves float64 tensors as they are.

Some of PyTorch's kernels take no float64. The scale of `GradScaler`, a power of two, stays in float32: the product with
a loss in float64 is exact. The products of groups of rows (`grouped_mm`) are computed by one product per group.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # PyTorch's customary alias
from torch import Tensor
from torch.amp import grad_scaler
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

LOW_PRECISION = frozenset({torch.float32, torch.float16, torch.bfloat16})
_COMPLEX = frozenset({torch.complex64, torch.complex32})
_CASTS: frozenset[Callable[..., Any]] = frozenset({Tensor.float, Tensor.half, Tensor.bfloat16})
_SOURCES: frozenset[Callable[..., Any]] = frozenset(
    {torch.from_numpy, torch.frombuffer, torch.tensor, torch.as_tensor, torch.asarray, torch.from_file}
)
"""Functions whose result has the dtype of data outside of PyTorch."""
_UNTOUCHED: frozenset[Callable[..., Any]] = frozenset({Tensor.view, Tensor.copy_, Tensor.set_})
_GROUPED: frozenset[Callable[..., Any]] = frozenset(
    getattr(module, name) for module, name in ((torch, "_grouped_mm"), (F, "grouped_mm")) if hasattr(module, name)
)
"""Functions without a kernel for float64, by the names that versions of PyTorch give them."""


class Float64Mode(TorchFunctionMode):
    """Replaces low floating-point types by float64 in every call of a PyTorch function from Python."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function with float64 in place of lower types."""
        if sys._getframe(1).f_code.co_filename == grad_scaler.__file__:
            return func(*args, **kwargs or {})
        if func in _GROUPED and args[0].dtype == torch.float64:
            return multiply_groups(*args, **kwargs or {})
        if func in _CASTS:
            return args[0].to(torch.float64)
        kwargs = dict(kwargs or {})
        if func in _UNTOUCHED:
            return func(*args, **kwargs)
        args = tuple(widen_dtype(item) for item in args)
        kwargs = {name: widen_dtype(item) for name, item in kwargs.items()}
        if not getattr(func, "__name__", "").endswith("_"):
            args = widen_mixed(args)
        result = func(*args, **kwargs)
        return widen(result) if func in _SOURCES else result


def enter_float64_mode() -> None:
    """Compute in float64 in this process from now on."""
    torch.set_default_dtype(torch.float64)
    set_default_dtype, load = torch.set_default_dtype, torch.load

    def set_widened_default(dtype: torch.dtype) -> None:
        set_default_dtype(widen_dtype(dtype))

    def load_widened(*args: Any, **kwargs: Any) -> Any:
        return pytree.tree_map(widen, load(*args, **kwargs))

    module: Any = torch
    module.set_default_dtype, module.load = set_widened_default, load_widened
    Float64Mode().__enter__()  # type: ignore[no-untyped-call]  # untyped in torch


def widen_dtype(item: Any) -> Any:
    """Return float64 for a lower floating-point type, complex128 for a lower complex type, else the argument."""
    if type(item) is not torch.dtype:
        return item
    return torch.float64 if item in LOW_PRECISION else torch.complex128 if item in _COMPLEX else item


def widen(item: Any) -> Any:
    """Return a tensor of a low floating-point type in float64; anything else unchanged."""
    if not isinstance(item, Tensor) or item.dtype not in LOW_PRECISION | _COMPLEX:
        return item
    wide = item.detach().to(widen_dtype(item.dtype))
    if isinstance(item, torch.nn.Parameter):
        return torch.nn.Parameter(wide, requires_grad=item.requires_grad)
    return wide.requires_grad_(item.requires_grad)


def widen_mixed(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Widen the low tensors among the arguments if others are in float64; a tensor may come from a file."""
    dtypes = {item.dtype for item in args if isinstance(item, Tensor)}
    if torch.float64 not in dtypes or not dtypes & LOW_PRECISION:
        return args
    return tuple(
        item.to(torch.float64) if isinstance(item, Tensor) and item.dtype in LOW_PRECISION else item for item in args
    )


def multiply_groups(
    rows: Tensor, weights: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, **_: Any
) -> Tensor:
    """Compute `torch.nn.functional.grouped_mm` of rows, each with the matrix of its group, in float64.

    Args:
        rows: Of shape (rows, inputs); all other shapes are left to PyTorch, which refuses float64.
        weights: A matrix per group, of shape (groups, inputs, outputs).
        offs: The end of each group among the rows.
        bias: Unused by PyTorch so far.
    """
    if rows.dim() != 2 or weights.dim() != 3 or offs is None or bias is not None:
        return F.grouped_mm(rows, weights, offs=offs, bias=bias)
    group = (torch.arange(rows.shape[0], device=rows.device).unsqueeze(1) >= offs).sum(1, keepdim=True)
    total = rows.new_zeros(rows.shape[0], weights.shape[-1])
    for number in range(weights.shape[0]):
        total = torch.where(group == number, rows @ weights[number], total)
    return total

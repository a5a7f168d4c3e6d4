"""Which operators capture decomposes into simpler ones.

Capture decomposes losses and statistics that divide by a number of elements, so that the *logical* count is in the
program and survives sharding. All other operators stay: fewer nodes, and the kernels of the plain script.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._decomp import get_decompositions
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.utils import _pytree as pytree

from rankless.compiler.tracing.symbolic_sizes import has_count
from rankless.errors import CaptureError

aten = torch.ops.aten

TORCH_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = get_decompositions(
    [
        aten.mse_loss,
        aten.mse_loss_backward,
        aten.smooth_l1_loss,
        aten.smooth_l1_loss_backward,
        aten.huber_loss,
        aten.huber_loss_backward,
        aten.soft_margin_loss,
        aten.soft_margin_loss_backward,
        aten.binary_cross_entropy,
        aten.binary_cross_entropy_backward,
        aten.binary_cross_entropy_with_logits,
        aten.linalg_vector_norm,
        aten.norm,
        aten.logsumexp,
        aten.renorm,
        aten.dist,
        aten.addcmul,
        aten.addcdiv,
        aten.lerp,
        # Views, flips and reads by index have rules for more dims than these.
        aten.pixel_shuffle,
        aten.pixel_unshuffle,
        aten.rot90,
        aten._unsafe_masked_index,
        aten._unsafe_masked_index_put_accumulate,
    ]
)


def make_gradient_of_nothing(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """Return the decomposition of a loss's gradient, which for no elements has none: in Python 2 / 0 is an error."""

    def decompose(gradient: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return x.clone() if 0 in x.shape else decomposition(gradient, x, *args, **kwargs)

    return decompose


def decompose_variance_and_mean(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute variance and mean as sums divided by logical counts; the variance of complex numbers is real."""
    dims = list(range(x.dim())) if not dim else list(dim)
    count = prod(x.shape[item] for item in dims)
    # PyTorch's kernels accumulate half precision in float32.
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    mean = wide.sum(dims, keepdim=True) / count
    less = 1 if correction is None else correction
    divisor = torch.sym_max(count - int(less), 0) if has_count([count]) else max(count - less, 0)
    offset = wide - mean
    square = torch.view_as_real(offset).square().sum(-1) if x.is_complex() else offset.square()
    variance = square.sum(dims, keepdim=keepdim) / divisor
    if wide is not x:
        variance, mean = variance.to(x.dtype), mean.to(x.dtype)
    return variance, mean if keepdim else mean.squeeze(dims)


def decompose_unbiased_variance(
    x: Tensor, dim: Sequence[int] | None = None, unbiased: bool = True, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute variance and mean for the older signature with `unbiased`."""
    return decompose_variance_and_mean(x, dim, correction=int(unbiased), keepdim=keepdim)


def decompose_deviation_and_mean(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Compute the standard deviation and the mean, given the arguments of the variance."""
    variance, mean = decompose_variance_and_mean(*args, **kwargs)
    return variance.sqrt(), mean


STATISTICS_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.var.correction: lambda *args, **kwargs: decompose_variance_and_mean(*args, **kwargs)[0],
    aten.var.dim: lambda *args, **kwargs: decompose_unbiased_variance(*args, **kwargs)[0],
    aten.var.default: lambda x, unbiased=True: decompose_unbiased_variance(x, None, unbiased)[0],
    aten.var_mean.correction: decompose_variance_and_mean,
    aten.std.correction: lambda *args, **kwargs: decompose_variance_and_mean(*args, **kwargs)[0].sqrt(),
    aten.std.dim: lambda *args, **kwargs: decompose_unbiased_variance(*args, **kwargs)[0].sqrt(),
    aten.std_mean.correction: decompose_deviation_and_mean,
    aten.std.default: lambda x, unbiased=True: decompose_unbiased_variance(x, None, unbiased)[0].sqrt(),
}
"""Statistics that PyTorch decomposes only to its own `prims.var`."""


def make_contiguous_decomposition(operator: Any) -> Callable[..., Any]:
    """Return the decomposition of an operator whose kernel makes contiguous results, whatever the layout it gets."""

    def decompose(*args: Any, **kwargs: Any) -> Any:
        if all(item.is_contiguous() for item in args if isinstance(item, Tensor)):
            return NotImplemented  # the trace is right, and keeps the operator
        return operator(*[item.contiguous() if isinstance(item, Tensor) else item for item in args], **kwargs)

    return decompose


def make_memory_format_decomposition(operator: Any, position: int) -> Callable[..., Any]:
    """Return the decomposition of an operator whose kernel gives its result the memory format of one argument."""

    def decompose(*args: Any) -> Any:
        memory = suggest_memory_format(args[position])
        if memory == torch.contiguous_format:
            return NotImplemented  # the trace is right, and keeps the operator
        found = operator(*[item.contiguous() if isinstance(item, Tensor) else item for item in args])
        return found.contiguous(memory_format=memory)

    return decompose


def copy_if_same_shape(x: Tensor, template: Tensor, *, memory_format: torch.memory_format | None = None) -> Any:
    """Return a copy, in the same layout, for a shape that a tensor has: its kernel then does nothing."""
    if memory_format is not None or x.shape != template.shape:
        return NotImplemented
    return x.clone(memory_format=torch.preserve_format)


LAYOUT_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    **{
        operator: make_contiguous_decomposition(operator)
        for operator in (
            aten.pow.Scalar,
            aten.log_sigmoid_forward.default,
            aten.glu_backward.default,
            aten.native_layer_norm_backward.default,
            aten.normal.Tensor_Tensor,
            aten.normal.float_Tensor,
            aten.poisson.default,
            aten._standard_gamma.default,
        )
    },
    **{
        operator: make_memory_format_decomposition(operator, position)
        for operator, position in (
            (aten.reflection_pad2d_backward.default, 1),
            (aten.replication_pad2d_backward.default, 1),
            (aten.max_unpool2d.default, 0),
            (aten.channel_shuffle.default, 0),
        )
    },
    aten.resize_as.default: copy_if_same_shape,
    aten.native_dropout_backward.default: lambda grad, mask, scale: grad * mask * scale,
}
"""Operators for which PyTorch traces other strides than those of its kernels, as their kernels compute them."""


VIEWS_WITH_COPIES = (
    "alias", "diagonal", "expand", "narrow", "permute", "split_with_sizes", "squeeze", "t", "transpose", "unbind",
    "unfold", "unsqueeze", "view",
)  # fmt: skip


def list_view_copies() -> Iterator[tuple[Any, Callable[..., Any]]]:
    """Yield the operators that copy a view, such as `aten.expand_copy`, and their decompositions."""
    for name in VIEWS_WITH_COPIES:
        view, copied = getattr(aten, name), getattr(aten, f"{name}_copy")
        for overload in copied.overloads():
            if not overload.endswith("out"):
                yield getattr(copied, overload), make_view_copy_decomposition(getattr(view, overload))
    # Its kernel takes memory in any order, as `reshape` does.
    yield aten.view_copy.default, make_view_copy_decomposition(aten.reshape.default)


def make_view_copy_decomposition(view: Any) -> Callable[..., Any]:
    """Return the decomposition of a copy of a view to the view, which has rules, and a copy."""

    def decompose(*args: Any, **kwargs: Any) -> Any:
        return pytree.tree_map_only(
            Tensor, lambda item: item.clone(memory_format=torch.contiguous_format), view(*args, **kwargs)
        )

    return decompose


def select_by_mask(x: Tensor, mask: Tensor) -> Tensor:
    """Select the elements of a tensor where a mask is true: by an index, which has rules."""
    rows, chosen = torch.broadcast_tensors(x, mask)
    selected: Tensor = rows[chosen]
    return selected


def decompose_multilabel_margin_loss(x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """Compute the loss of the targets before the first -1; PyTorch's decomposition also counts class 0 for the rest."""
    rows, labels = torch.atleast_2d(x), torch.atleast_2d(target)
    classes = torch.arange(rows.shape[1], device=labels.device)
    is_label = (labels == -1).cumsum(1) == 0
    known = torch.where(is_label, labels, 0)
    is_target = ((known.unsqueeze(-1) == classes) & is_label.unsqueeze(-1)).any(1)
    margins = (1 - rows.gather(1, known).unsqueeze(-1) + rows.unsqueeze(1)).clamp_min(0)
    counted = is_label.unsqueeze(-1) & ~is_target.unsqueeze(1)
    losses = torch.where(counted, margins, 0).sum((1, 2)) / rows.shape[1]
    if reduction == 0:
        result = losses if x.dim() == 2 else losses.squeeze(0)
    else:
        result = losses.mean() if reduction == 1 else losses.sum()
    return result, is_target.to(x.dtype).reshape(target.shape)


def fill_diagonal(x: Tensor, value: float, wrap: bool = False) -> Tensor:
    """Fill the main diagonal in place by views of the tensor; PyTorch's own kernel uses strides in memory."""
    if x.dim() == 2:
        rows, columns = x.shape
        x.diagonal().fill_(value)
        for start in range(columns + 1, rows, columns + 1) if wrap else ():
            x[start:].diagonal().fill_(value)
        return x
    is_diagonal = torch.ones((), dtype=torch.bool, device=x.device)
    first = torch.arange(x.shape[0], device=x.device).view(-1, *[1] * (x.dim() - 1))
    for dim, size in enumerate(x.shape[1:], 1):
        is_diagonal = is_diagonal & (first == torch.arange(size, device=x.device).view(-1, *[1] * (x.dim() - 1 - dim)))
    return x.masked_fill_(is_diagonal, value)


def draw_between(x: Tensor, low: int, high: int | None, *, generator: torch.Generator | None = None) -> Tensor:
    """Fill a tensor with integers from `low` to below `high`, from the numbers below `high - low` that PyTorch draws.

    PyTorch cannot write its own operator, whose name is a keyword of Python, into a graph.
    """
    if high is None:
        raise CaptureError(
            expected="random integers with two limits",
            found=f"random_({low}, None)",
            fix="pass the upper limit too",
        )
    return x.random_(high - low, generator=generator).add_(low)


def decompose_average_pooling(x: Tensor, output_size: Sequence[int]) -> Tensor:
    """Pool to a given size. PyTorch's mean over a channels_last image would set strides by `as_strided_`."""
    pool = aten._adaptive_avg_pool2d if len(output_size) == 2 else aten._adaptive_avg_pool3d
    if any(size != 1 for size in output_size):
        pooled: Tensor = pool(x, output_size)
        return pooled
    memory = suggest_memory_format(x)
    mean = x.mean([-1 - dim for dim in range(len(output_size))], keepdim=True)
    return mean if memory == torch.contiguous_format else mean.clone(memory_format=memory)


def refuse_packing(*_args: Any, **_kwargs: Any) -> Any:
    """Refuse `pack_padded_sequence`: the lengths of what it packs are values, and it does not select rows."""
    raise DynamicOutputShapeException(aten._pack_padded_sequence.default)


CORRECTED: dict[Any, Callable[..., Any]] = {
    aten.multilabel_margin_loss_forward.default: decompose_multilabel_margin_loss,
    aten.fill_diagonal_.default: fill_diagonal,
    aten.masked_select.default: select_by_mask,
    aten.random_.__getattr__("from"): draw_between,
    aten._pack_padded_sequence.default: refuse_packing,
    aten.adaptive_avg_pool2d.default: decompose_average_pooling,
    aten.adaptive_avg_pool3d.default: decompose_average_pooling,
}
"""Operators that PyTorch traces into other ones than its kernels compute, or into ones that cannot be split."""


@contextlib.contextmanager
def autograd_kernels(kernels: Mapping[Any, Callable[..., Any] | None]) -> Iterator[None]:
    """Within the context, operators run these functions above autograd, if PyTorch's Python dispatcher is enabled.

    None stands for PyTorch's own kernel.
    """
    before = {operator: operator.py_kernels.get(_get_autograd_key(operator)) for operator in kernels}
    _set_autograd_kernels(kernels)
    try:
        yield
    finally:
        _set_autograd_kernels(before)


def _set_autograd_kernels(kernels: Mapping[Any, Callable[..., Any] | None]) -> None:
    for operator, kernel in kernels.items():
        key = _get_autograd_key(operator)
        operator.py_kernels.pop(key, None)
        if kernel is not None:
            operator.py_kernels[key] = kernel
        operator._dispatch_cache.clear()


def _get_autograd_key(operator: Any) -> DispatchKey:
    """Return the key at which autograd calls an operator: PyTorch prefers the composition of a composite operator."""
    composite = DispatchKey.CompositeImplicitAutograd
    is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), composite)
    return composite if is_composite else DispatchKey.Autograd


LOSS_GRADIENTS = (
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
)
"""Those whose decompositions divide a number by the number of elements."""
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = (
    TORCH_DECOMPOSITIONS
    | {item: make_gradient_of_nothing(TORCH_DECOMPOSITIONS[item]) for item in LOSS_GRADIENTS}
    | STATISTICS_DECOMPOSITIONS
    | LAYOUT_DECOMPOSITIONS
    | dict(list_view_copies())
)

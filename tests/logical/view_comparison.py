"""Compare what a call computes in the logical view with plain PyTorch on the whole batch, in float64."""

from collections.abc import Callable
from typing import Any, Literal

import numpy
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rankless.logical_view.tensor import DividedTensor, LogicalView, shard_rows
from rankless.parallel.tensor_placement import split_lengths

Source = Literal["data", "leaf", "weight", "twice"]
"""Whether a batch has no gradient, is a leaf that needs one, or was computed from a parameter; then also whether the
gradient of its gradient is asked for."""


def make_batch() -> Tensor:
    return torch.arange(35.0).reshape(7, 5) - 11


def divide(batch: Tensor, view: LogicalView) -> DividedTensor:
    lengths = split_lengths(len(batch), view.mesh.size)
    start = sum(lengths[: view.mesh.rank])
    return shard_rows(batch[start : start + lengths[view.mesh.rank]].clone(), lengths, view)


def differentiate(call: Callable[[Tensor], Any], batch: Tensor, source: Source) -> Any:
    """Return what a call returns and, unless the source is data, the gradient of the sum of its squares."""
    torch.manual_seed(1)
    if source == "data":
        return call(batch)
    weight = batch.requires_grad_() if source == "leaf" else torch.full((5,), 1.5, requires_grad=True)
    result = call(weight if source == "leaf" else batch * weight)
    tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not tensors:
        return result
    loss = sum((tensor * tensor).sum() for tensor in tensors)
    if source == "twice":
        (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
        loss = gradient.square().sum() if gradient.requires_grad else loss
    loss.backward()
    return result, weight.grad, loss


def to_plain(value: Any) -> Any:
    """Return a result with whole tensors and arrays as (kind, shape, dtype, values)."""
    if isinstance(value, DividedTensor):
        value = value.whole()
    if isinstance(value, Tensor):
        return "tensor", tuple(value.shape), str(value.dtype), value.detach().clone()
    if isinstance(value, numpy.ndarray):
        return "array", value.shape, str(value.dtype), torch.as_tensor(value.copy())
    return value


def describe(call: Callable[[Tensor], Any], batch: Tensor, source: Source) -> list[Any]:
    """Return the leaves of what a call returns, or its error."""
    try:
        result = differentiate(call, batch, source)
    except (RuntimeError, BufferError, LookupError, TypeError, ValueError) as error:
        return [type(error), str(error).partition("\n")[0].replace("a view of a leaf", "a leaf")]
    with torch.no_grad():
        return pytree.tree_leaves(pytree.tree_map(to_plain, result))


def is_equal(expected: list[Any], found: list[Any]) -> bool:
    if len(expected) != len(found):
        return False
    for one, other in zip(expected, found, strict=True):
        if isinstance(one, Tensor):
            same = one.shape == other.shape and torch.allclose(
                one.to(torch.complex128), other.to(torch.complex128), atol=1e-10, rtol=1e-10, equal_nan=True
            )
        elif isinstance(one, float):
            same = one == other or abs(one - other) <= 1e-9 * max(1.0, abs(one))
        else:
            same = one == other
        if not same:
            return False
    return True

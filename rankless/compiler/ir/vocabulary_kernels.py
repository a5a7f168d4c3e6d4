"""What one rank computes on its part of a vocabulary: rows of a table, and the scores of its classes.

Lowered programs call these plain functions on local tensors, below autograd. They are in no logical graph.
"""

from collections.abc import Callable

import torch
from torch import Tensor

aten = torch.ops.aten
OUTSIDE = -1
"""Stands for every class that this rank does not have, and for targets that are ignored."""


def look_up_rows(table: Tensor, indices: Tensor, start: int, count: int) -> Tensor:
    """Return rows of a table by index, with zeros in place of the rows of other ranks.

    Args:
        table: This rank's rows, shape (rows, columns).
        indices: Indices of the whole table, of any shape.
        start: The index of this rank's first row.
        count: The number of rows of the whole table.

    Returns:
        A tensor of shape (*indices.shape, columns).
    """
    raise_if_outside(indices, count, "index out of range in self")
    if table.shape[0] == 0:
        return table.new_zeros((*indices.shape, table.shape[1]))
    place, is_own = find_places(indices, start, table.shape[0])
    rows: Tensor = aten.embedding.default(table, place.where(is_own, 0))
    return rows.masked_fill_(~is_own.unsqueeze(-1), 0)


def add_to_own_rows(
    grad: Tensor, indices: Tensor, rows: tuple[int, int], padding_idx: int, by_frequency: bool
) -> Tensor:
    """Return this rank's rows of the gradient of a table.

    Args:
        grad: The gradient of the values that were looked up, shape (*indices.shape, columns).
        indices: Indices of the whole table, of any shape.
        rows: The index of this rank's first row, and their number.
        padding_idx: The index of a row without gradient; negative for none.
        by_frequency: Whether each row's gradient is divided by the number of its occurrences.

    Returns:
        A tensor of shape (number of rows, columns).
    """
    start, length = rows
    if not indices.numel():
        return grad.new_zeros((length, grad.shape[-1]))  # PyTorch's kernel for GPUs may raise
    place, is_own = find_places(indices, start, length)
    # One row more than the rank has is the padding row: what falls there contributes nothing.
    place = place.where(is_own & (indices != padding_idx), length)
    result: Tensor = aten.embedding_dense_backward.default(grad, place, length + 1, length, by_frequency)
    return result.narrow(0, 0, length)


def find_places(indices: Tensor, start: int, length: int) -> tuple[Tensor, Tensor]:
    """Return indices counted from this rank's first row, and which of them are its own; both as `indices` in shape."""
    place = indices - start
    return place, (place >= 0) & (place < length)


def raise_if_outside(indices: Tensor, count: int, message: str) -> None:
    """Raise `IndexError` as PyTorch's kernels do on a CPU; on other devices an assertion of the device fails."""
    is_valid = ((indices >= 0) & (indices < count)).all()
    if indices.device.type != "cpu":
        torch._assert_async(is_valid, message)
    elif not is_valid:
        raise IndexError(message)


ClassRange = tuple[int, int, int, int, int]
"""The dim of scores that holds the classes; a rank's first class and number of classes; the number of all classes; and
the target that is ignored."""


def find_own_targets(target: Tensor, classes: ClassRange) -> Tensor:
    """Return targets counted from this rank's first class, and `OUTSIDE` for others; in the shape of `target`."""
    _, start, length, count, ignore_index = classes
    target = target.long().contiguous()  # targets may be bytes, which have no negative numbers
    is_counted = target != ignore_index
    raise_if_outside(target.masked_fill(~is_counted, 0), max(count, 1), "a target is out of bounds")
    place, is_own = find_places(target, start, length)
    return place.where(is_own & is_counted, OUTSIDE)


def find_target_losses(
    scores: Tensor, target: Tensor, weight: Tensor | None, classes: ClassRange, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the losses and the weights of those targets that are among this rank's classes, and zero for others.

    Args:
        scores: The scores of this rank's classes, shape (rows, classes, …) or (classes,).
        target: Classes among all, shape (rows, …) or ().
        weight: The weights of this rank's classes, shape (classes,).
        classes: This rank's classes.
        dtype: The dtype of the results.

    Returns:
        Two tensors of the targets' shape.
    """
    if scores.dim() == 1:
        target = target.reshape(())
    place, dim = find_own_targets(target, classes), classes[0]
    if scores.shape[dim] == 0:
        zeros = torch.zeros(target.shape, dtype=dtype, device=scores.device)
        return zeros, zeros
    is_own, place = place != OUTSIDE, place.clamp(min=0)
    found = scores.gather(dim, place.unsqueeze(dim)).squeeze(dim).to(dtype)
    weights = torch.ones_like(found) if weight is None else weight[place].to(dtype)
    return torch.where(is_own, -found * weights, 0), torch.where(is_own, weights, 0)


def add_target_losses(
    scores: Tensor, target: Tensor, weight: Tensor | None, classes: ClassRange, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the sums of `find_target_losses`, two tensors of shape ()."""
    losses, weights = find_target_losses(scores, target, weight, classes, dtype)
    return losses.sum(), weights.sum()


def weigh_own_targets(target: Tensor, weight: Tensor | None, classes: ClassRange, dtype: torch.dtype) -> Tensor:
    """Return the second sum of `add_target_losses`, without scores."""
    place = find_own_targets(target, classes)
    is_own = place != OUTSIDE
    if weight is None or weight.numel() == 0:
        return is_own.sum().to(dtype)
    return torch.where(is_own, weight[place.clamp(min=0)].to(dtype), 0).sum()


def differentiate_target_losses(
    operator: Callable[..., Tensor],
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None],
    classes: ClassRange,
    reduction: int,
    total: Tensor,
) -> Tensor:
    """Return the gradient of the scores of this rank's classes, in their shape.

    Args:
        operator: PyTorch's operator for the gradient.
        tensors: The gradient of the loss; scores, targets and weights as for `find_target_losses`.
        classes: This rank's classes.
        reduction: PyTorch's number for the reduction.
        total: The weight of all targets, shape ().
    """
    grad, scores, target, weight = tensors
    if scores.numel() == 0:
        return torch.zeros_like(scores)
    return operator(grad, scores, find_own_targets(target, classes), weight, reduction, OUTSIDE, total)


# Note [sharded softmax]: each rank has some entries of every row. The largest entry of a row is the largest of those of
# all ranks, and the sum of exponentials is the sum of theirs, so two small collectives replace a gather of all entries.
# This is the parallel cross entropy of Megatron-LM (Shoeybi et al., 2019).


def find_maxima(x: Tensor, dim: int) -> Tensor:
    """Return the maxima along a dim, which stays with size one; minus infinity if the dim has no entries."""
    if x.shape[dim] == 0:
        shape = list(x.shape)
        shape[dim] = 1
        return x.new_full(shape, -torch.inf)
    return x.amax(dim, keepdim=True)


def subtract_maxima(x: Tensor, gathered: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x minus the largest of all ranks' maxima, which have shape (ranks, *maxima), in another dtype.

    The result is contiguous, as that of PyTorch's softmax.
    """
    return x.to(dtype).contiguous() - gathered.amax(0).to(dtype)


def add_exponentials(x: Tensor, dim: int) -> Tensor:
    """Return the sum of exponentials along a dim, which stays with size one."""
    return x.exp().sum(dim, keepdim=True)


def finish_log_softmax(x: Tensor, total: Tensor, dtype: torch.dtype) -> Tensor:
    """Return logarithms of probabilities, given x minus the maxima and the sums of all ranks' exponentials."""
    return (x - total.log()).to(dtype)


def finish_softmax(x: Tensor, total: Tensor, dtype: torch.dtype) -> Tensor:
    """Return probabilities, given x minus the maxima and the sums of all ranks' exponentials."""
    return (x.exp() / total).to(dtype)


def finish_safe_softmax(x: Tensor, total: Tensor, gathered: Tensor, dtype: torch.dtype) -> Tensor:
    """Return probabilities, and zeros where all entries of a row are minus infinity."""
    return finish_softmax(x, total, dtype).masked_fill_(gathered.amax(0) == -torch.inf, 0)


def add_log_softmax_terms(grad: Tensor, output: Tensor, dim: int) -> Tensor:
    """Return the sum along a dim, which stays with size one, that the gradient of log_softmax needs."""
    return grad.sum(dim, keepdim=True, dtype=widen(output))


def add_softmax_terms(grad: Tensor, output: Tensor, dim: int) -> Tensor:
    """Return the sum along a dim, which stays with size one, that the gradient of softmax needs."""
    wide = widen(output)
    return (grad.to(wide) * output.to(wide)).sum(dim, keepdim=True)


def finish_log_softmax_gradient(grad: Tensor, output: Tensor, total: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient of log_softmax, given the sum over all ranks."""
    return (grad.to(total.dtype).contiguous() - output.to(total.dtype).exp() * total).to(dtype)


def finish_softmax_gradient(grad: Tensor, output: Tensor, total: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient of softmax, given the sum over all ranks."""
    return ((grad.to(total.dtype).contiguous() - total) * output.to(total.dtype)).to(dtype)


def widen(value: Tensor) -> torch.dtype:
    """Return the dtype in which PyTorch accumulates sums of a value."""
    return torch.float32 if value.dtype in (torch.float16, torch.bfloat16) else value.dtype


PURE_KERNELS = (
    look_up_rows,
    add_to_own_rows,
    find_target_losses,
    add_target_losses,
    weigh_own_targets,
    differentiate_target_losses,
    find_maxima,
    subtract_maxima,
    add_exponentials,
    finish_log_softmax,
    finish_softmax,
    finish_safe_softmax,
    add_log_softmax_terms,
    add_softmax_terms,
    finish_log_softmax_gradient,
    finish_softmax_gradient,
)
"""The functions of this module that programs call. Their results depend on their arguments alone."""

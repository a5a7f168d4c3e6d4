"""What one rank computes where an operator alone will not do: merged statistics, whole draws, pieces.

Plain functions on local tensors, called from lowered programs; they are in no graph and run below autograd.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def slice_dim(whole: Tensor, dim: int, start: int, length: int) -> Tensor:
    """Rows `start` to `start + length` of a dim, as a view."""
    return whole.narrow(dim, start, length)


def keep_on_rank_zero(value: Tensor, rank: int) -> Tensor:
    """A whole value as a partial sum: rank 0 holds it, the others zeros."""
    return value if rank == 0 else torch.zeros_like(value)


def draw_and_slice(
    operator: Callable[..., Tensor],
    example: tuple[Sequence[int], Sequence[int], torch.dtype],
    device: torch.device,
    arguments: Sequence[Any],
    part: tuple[int, int, int] | None,
) -> Tensor:
    """A random operator drawn for the whole logical value, in its memory order; then this rank's part of it.

    The generator thus moves on every rank as it does in the plain script, and the numbers are the plain script's.
    """
    shape, strides, dtype = example
    whole = operator(torch.empty_strided(shape, strides, dtype=dtype, device=device), *arguments)
    return whole if part is None else whole.narrow(*part).clone()


def apply_dropout(x: Tensor, mask: Tensor, probability: float) -> Tensor:
    """Dropout with a mask of what stays."""
    scale = 0.0 if probability == 1 else 1.0 / (1.0 - probability)
    return x.mul(mask).mul_(scale)


def draw_dropout_mask(
    example: tuple[Sequence[int], Sequence[int], torch.dtype],
    device: torch.device,
    probability: float,
    part: tuple[int, int, int] | None,
) -> Tensor:
    """What stays, drawn for the whole logical value as `torch.nn.functional.dropout` does on this device."""
    shape, strides, dtype = example
    like = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    if probability == 1:
        # Nothing stays, and PyTorch draws nothing.
        whole = torch.zeros_like(like, dtype=torch.bool)
    elif device.type == "cpu":
        whole = torch.empty_like(like, dtype=torch.bool).bernoulli_(1 - probability)
    else:
        whole = aten.native_dropout.default(like, probability, True)[1]
    return whole if part is None else whole.narrow(*part).clone()


# Note [merged moments]: each rank takes mean and variance of its own rows; those are gathered and merged by Chan,
# Golub and LeVeque's formula (1979) with the counts as weights. One collective, and no loss of digits as with sums of
# squares.


def channel_moments(x: Tensor) -> Tensor:
    """Mean and biased variance per channel (dim 1), stacked: shape (2, channels)."""
    dims = [dim for dim in range(x.dim()) if dim != 1]
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    variance, mean = torch.var_mean(wide, dims, correction=0)
    return torch.stack([mean, variance])


def merge_moments(gathered: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Mean and biased variance per channel of all rows, from every rank's (ranks, 2, channels) and row counts."""
    total = sum(counts)
    weights = torch.tensor([count / total for count in counts], dtype=gathered.dtype, device=gathered.device)
    means, variances = gathered[:, 0], gathered[:, 1]
    mean = weights @ means
    return mean, weights @ (variances + (means - mean) ** 2)


def batch_norm(
    x: Tensor,
    affine: tuple[Tensor | None, Tensor | None],
    running: tuple[Tensor | None, Tensor | None],
    gathered: Tensor,
    settings: tuple[Sequence[int], float, float],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Batch norm with the statistics of all ranks: output, mean, reciprocal deviation, new running mean and variance.

    `settings` is (every rank's number of values per channel, momentum, epsilon). Ioffe and Szegedy, 2015.
    """
    counts, momentum, epsilon = settings
    mean, variance = merge_moments(gathered, counts)
    output = aten.native_batch_norm.default(x, *affine, mean, variance, False, 0.0, epsilon)[0]
    reciprocal = torch.rsqrt(variance + epsilon)
    running_mean, running_variance = running
    if running_mean is None or running_variance is None:
        return output, mean, reciprocal, running_mean, running_variance
    total = sum(counts)
    unbiased = variance * (total / (total - 1)) if total > 1 else variance
    return (
        output,
        mean,
        reciprocal,
        (running_mean * (1 - momentum) + mean * momentum).to(running_mean.dtype),
        (running_variance * (1 - momentum) + unbiased * momentum).to(running_variance.dtype),
    )


def batch_norm_local_gradients(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, reciprocal: Tensor
) -> tuple[Tensor, Tensor]:
    """What this rank alone knows of the gradients: that of x if statistics were constants, and the sums per channel.

    The sums, shape (2, channels), are those of grad * normalised x and of grad.
    """
    variance = reciprocal**-2
    direct, by_weight, by_bias = aten.native_batch_norm_backward.default(
        grad, x, weight, mean, variance, None, None, False, 0.0, [True, True, True]
    )
    return direct, torch.stack([by_weight, by_bias])


def batch_norm_input_gradient(
    direct: Tensor,
    x: Tensor,
    weight: Tensor | None,
    statistics: tuple[Tensor, Tensor, Tensor],
    count: int,
) -> Tensor:
    """The gradient of x with the statistics' share: direct - weight * r / count * (sum(g) + xhat * sum(g * xhat))."""
    sums, mean, reciprocal = statistics
    scale = reciprocal / count if weight is None else weight * reciprocal / count
    slope = scale * sums[0] * reciprocal
    shape = [1, -1] + [1] * (x.dim() - 2)
    offset = (scale * sums[1] - slope * mean).to(x.dtype).view(shape)
    return direct.sub_(offset).addcmul_(x, slope.to(x.dtype).view(shape), value=-1)


def reduce_extremum(gathered: Tensor, name: str) -> Tensor:
    """The maximum or minimum over ranks; unlike a reduction's, it keeps NaN."""
    return gathered.amax(0) if name == "max" else gathered.amin(0)

"""Batch normalization over the batches of all ranks, on any device.

Note [statistics in float64]: what ranks tell each other is small, so counts, means and sums of squares travel in
float64 and are merged there (Chan, Golub, LeVeque 1979): a count is exact, and variances do not cancel.
"""

from typing import Any

import torch
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from rankless.compat.horovod.common.process_sets import global_process_set
from rankless.compat.horovod.engine.requests import Reduction
from rankless.compat.horovod.torch.basics import size
from rankless.compat.horovod.torch.operations.allgather import allgather_async
from rankless.compat.horovod.torch.operations.allreduce import start
from rankless.compat.horovod.torch.operations.differentiable import applied
from rankless.compat.horovod.torch.operations.handles import synchronize
from rankless.compat.horovod.torch.operations.reductions import combining


class SyncBatchNorm(_BatchNorm):
    """torch's BatchNorm of any number of dimensions, as if one device had the whole batch.

    Ranks' batches may differ in length. Gradients of weight and bias are this rank's part: the optimizer combines them.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The input, normalized over the whole batch in training, by the running statistics in evaluation."""
        self._check_input_dim(input)
        tracked = self.track_running_stats and self.running_mean is not None
        if not self.training and tracked:
            return functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        factor = self._next_factor() if self.training and tracked else 0.0
        if size() == 1:
            mean, variance = (self.running_mean, self.running_var) if factor else (None, None)
            return functional.batch_norm(input, mean, variance, self.weight, self.bias, True, factor, self.eps)
        results: tuple[torch.Tensor, ...] = applied(Normalized, input, self.weight, self.bias, self.eps)
        output, mean, variance, count = results
        if self.training and tracked:
            self._track(mean, variance * (count / (count - 1)), factor)
        return output

    def _next_factor(self) -> float:
        """How much this batch counts in the running statistics."""
        batches = self.num_batches_tracked
        if batches is not None:
            batches.add_(1)
            if self.momentum is None:
                return 1.0 / float(batches)
        return self.momentum or 0.0

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, factor: float) -> None:
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            if running is not None:
                running.mul_(1 - factor).add_(new.to(running.dtype), alpha=factor)


class Normalized(torch.autograd.Function):
    """The normalized input, and the whole batch's mean, variance and number of values for each channel."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Statistics are merged over the ranks."""
        values = input.to(_precise(input.dtype))
        mean, variance, count = _whole_statistics(values)
        if int(count) <= 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.shape}")
        inverse = (variance + eps).rsqrt()
        normal = (values - _along(mean, values)) * _along(inverse, values)
        output = normal if weight is None else normal * _along(weight, values)
        output = output if bias is None else output + _along(bias, values)
        ctx.save_for_backward(normal, weight, inverse, count)
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        """The gradient of all ranks' losses with respect to this rank's input; this rank's part of the weight's."""
        normal, weight, inverse, count = ctx.saved_tensors
        precise = gradient.to(normal.dtype)
        dims = _all_but_channels(normal)
        sums = torch.stack([precise.sum(dims), (precise * normal).sum(dims)])
        of_bias, of_weight = sums.to(gradient.dtype if weight is None else weight.dtype)
        whole = sums.to(torch.float64, copy=True)
        rule = combining(Reduction.SUM, 1.0, 1.0, global_process_set)
        mean, mean_normal = synchronize(start(whole, whole, "sync_batch_norm.gradients", rule)) / count
        scale = inverse if weight is None else inverse * weight
        centred = precise - _along(mean, precise) - normal * _along(mean_normal, precise)
        of_input = (centred * _along(scale, precise)).to(gradient.dtype)
        return of_input, None if weight is None else of_weight, of_bias if ctx.needs_input_grad[2] else None, None


def _whole_statistics(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean and variance of each channel over all ranks' values, in float64, and their number."""
    dims, channels = _all_but_channels(values), values.shape[1]
    count = values.numel() // max(channels, 1)
    if count:
        variance, mean = torch.var_mean(values, dims, correction=0)
    else:
        variance = mean = values.new_zeros(channels)
    row = torch.cat([values.new_full((1,), count, dtype=torch.float64), mean.double(), variance.double() * count])
    rows = synchronize(allgather_async(row.unsqueeze(0), "sync_batch_norm.statistics"))
    counts, means, squares = rows[:, :1], rows[:, 1 : 1 + channels], rows[:, 1 + channels :]
    whole_count = counts.sum()
    whole_mean = (means * counts).sum(0) / whole_count
    whole_squares = (squares + counts * (means - whole_mean) ** 2).sum(0)
    return whole_mean, whole_squares / whole_count, whole_count


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _all_but_channels(values: torch.Tensor) -> list[int]:
    return [dim for dim in range(values.dim()) if dim != 1]


def _along(of_channels: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One number for each channel, in the values' shape and dtype."""
    return of_channels.to(values.dtype).view(1, -1, *[1] * (values.dim() - 2))

"""Batch normalization over the batches of all ranks, on any device.

Note [statistics in float64]: the ranks send counts, means and sums of squares in float64, since these are small, and
merge them there (source: Chan, Golub, LeVeque 1979). So counts are exact, and variances do not cancel.
"""

from typing import Any

import torch
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from rankless.extensions.horovod.common.basics import size
from rankless.extensions.horovod.common.process_sets import global_process_set
from rankless.extensions.horovod.engine.requests import ReduceOpCode
from rankless.extensions.horovod.torch.operations.allgather import allgather_async
from rankless.extensions.horovod.torch.operations.allreduce import start
from rankless.extensions.horovod.torch.operations.handles import apply_function, synchronize
from rankless.extensions.horovod.torch.operations.reduction_rule import make_reduction_rule


class SyncBatchNorm(_BatchNorm):
    """torch's BatchNorm for any number of dimensions, as if one device had the whole batch.

    The ranks' batches may differ in length. The gradients of weight and bias contain this rank's part only, since the
    optimizer combines them.
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
        """Normalize the input: over the whole batch in training, with the running statistics in evaluation."""
        self._check_input_dim(input)
        tracked = self.track_running_stats and self.running_mean is not None
        if not self.training and tracked:
            return functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        factor = self._advance_momentum() if self.training and tracked else 0.0
        if size() == 1:
            mean, variance = (self.running_mean, self.running_var) if factor else (None, None)
            return functional.batch_norm(input, mean, variance, self.weight, self.bias, True, factor, self.eps)
        results: tuple[torch.Tensor, ...] = apply_function(
            SyncBatchNormFunction, input, self.weight, self.bias, self.eps
        )
        output, mean, variance, count = results
        if self.training and tracked:
            self._update_running_statistics(mean, variance * (count / (count - 1)), factor)
        return output

    def _advance_momentum(self) -> float:
        """Count this batch, and return its weight in the running statistics."""
        batches = self.num_batches_tracked
        if batches is not None:
            batches.add_(1)
            if self.momentum is None:
                return 1.0 / float(batches)
        return self.momentum or 0.0

    @torch.no_grad()
    def _update_running_statistics(self, mean: torch.Tensor, variance: torch.Tensor, factor: float) -> None:
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            if running is not None:
                running.mul_(1 - factor).add_(new.to(running.dtype), alpha=factor)


class SyncBatchNormFunction(torch.autograd.Function):
    """Computes the normalized input, and each channel's mean, variance and number of values in the whole batch."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Normalize the input with statistics merged over the ranks."""
        values = input.to(_get_accumulation_dtype(input.dtype))
        mean, variance, count = _compute_global_statistics(values)
        if int(count) <= 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.shape}")
        inverse = (variance + eps).rsqrt()
        normalized = (values - _expand_channels(mean, values)) * _expand_channels(inverse, values)
        output = normalized if weight is None else normalized * _expand_channels(weight, values)
        output = output if bias is None else output + _expand_channels(bias, values)
        ctx.save_for_backward(normalized, weight, inverse, count)
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of all ranks' losses for this rank's input, and this rank's part for weight and bias."""
        normalized, weight, inverse, count = ctx.saved_tensors
        gradient_values = gradient.to(normalized.dtype)
        dims = _get_reduction_dims(normalized)
        sums = torch.stack([gradient_values.sum(dims), (gradient_values * normalized).sum(dims)])
        bias_gradient, weight_gradient = sums.to(gradient.dtype if weight is None else weight.dtype)
        global_sums = sums.to(torch.float64, copy=True)
        rule = make_reduction_rule(ReduceOpCode.SUM, 1.0, 1.0, global_process_set)
        mean, mean_normal = synchronize(start(global_sums, global_sums, "sync_batch_norm.gradients", rule)) / count
        scale = inverse if weight is None else inverse * weight
        centred = (
            gradient_values
            - _expand_channels(mean, gradient_values)
            - normalized * _expand_channels(mean_normal, gradient_values)
        )
        input_gradient = (centred * _expand_channels(scale, gradient_values)).to(gradient.dtype)
        return (
            input_gradient,
            None if weight is None else weight_gradient,
            bias_gradient if ctx.needs_input_grad[2] else None,
            None,
        )


def _compute_global_statistics(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each channel's mean and variance over all ranks' values, in float64, and the number of values."""
    dims, channels = _get_reduction_dims(values), values.shape[1]
    count = values.numel() // max(channels, 1)
    if count:
        variance, mean = torch.var_mean(values, dims, correction=0)
    else:
        variance = mean = values.new_zeros(channels)
    statistics = torch.cat(
        [values.new_full((1,), count, dtype=torch.float64), mean.double(), variance.double() * count]
    )
    all_statistics = synchronize(allgather_async(statistics.unsqueeze(0), "sync_batch_norm.statistics"))
    counts, means, squares = (
        all_statistics[:, :1],
        all_statistics[:, 1 : 1 + channels],
        all_statistics[:, 1 + channels :],
    )
    global_count = counts.sum()
    global_mean = (means * counts).sum(0) / global_count
    global_squares = (squares + counts * (means - global_mean) ** 2).sum(0)
    return global_mean, global_squares / global_count, global_count


def _get_accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _get_reduction_dims(values: torch.Tensor) -> list[int]:
    return [dim for dim in range(values.dim()) if dim != 1]


def _expand_channels(channel_values: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the channel values in a shape that broadcasts over `values`, and in their dtype."""
    return channel_values.to(values.dtype).view(1, -1, *[1] * (values.dim() - 2))

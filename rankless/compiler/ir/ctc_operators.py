"""The CTC loss as one node of the program, with the lengths as tensors.

PyTorch's operator needs the lengths as numbers to say how large its intermediate results are, so a trace cannot run
it, and numbers cannot be divided between ranks. This operator computes them again in the backward pass.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # PyTorch's customary alias
from torch import Tensor

CTC_LOSS = inspect.signature(F.ctc_loss)
BATCHED_DIMS = 3


def run_ctc_loss(
    scores: Tensor, targets: Tensor, score_lengths: Tensor, target_lengths: Tensor, blank: int
) -> tuple[Tensor, Tensor]:
    """Return the loss of each sequence, and what the backward pass needs."""
    lengths = score_lengths.tolist(), target_lengths.tolist()
    losses, paths = torch._ctc_loss(scores, targets, *lengths, blank, False)
    return losses, paths


@torch.library.custom_op("rankless::ctc_loss", mutates_args=())
def ctc_loss(
    scores: Tensor, targets: Tensor, score_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    """Compute the CTC loss of each sequence: `scores` has the dims time, sequence and class."""
    return run_ctc_loss(scores, targets, score_lengths, target_lengths, blank)[0]


@ctc_loss.register_fake
def _(scores: Tensor, *_others: Any) -> Tensor:
    return scores.new_empty((scores.shape[1],))


@torch.library.custom_op("rankless::ctc_loss_backward", mutates_args=())
def ctc_loss_backward(
    grads: Tensor,
    scores: Tensor,
    targets: Tensor,
    score_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """Compute the gradient of the scores."""
    losses, paths = run_ctc_loss(scores, targets, score_lengths, target_lengths, blank)
    lengths = score_lengths.tolist(), target_lengths.tolist()
    gradient: Tensor = torch.ops.aten._ctc_loss_backward(
        grads, scores, targets, *lengths, losses, paths, blank, zero_infinity
    )
    return gradient


@ctc_loss_backward.register_fake
def _(_grads: Tensor, scores: Tensor, *_others: Any) -> Tensor:
    return scores.new_empty(scores.shape)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grads: Tensor) -> tuple[Any, ...]:
    gradient = ctc_loss_backward(grads, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity)
    return gradient, None, None, None, None, None


ctc_loss.register_autograd(_backward, setup_context=_save_inputs)


def capture_ctc_loss(*args: Any, **kwargs: Any) -> Tensor:
    """Replace `F.ctc_loss` during capture. The steps around the operator are those of PyTorch."""
    bound = CTC_LOSS.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    scores, targets = given["log_probs"], given["targets"]
    score_lengths, target_lengths = (
        make_lengths(given[name], scores.device) for name in ("input_lengths", "target_lengths")
    )
    is_mixed = isinstance(given["input_lengths"], Tensor) != isinstance(given["target_lengths"], Tensor)
    if (
        is_mixed
        or score_lengths is None
        or target_lengths is None
        or scores.dim() not in (BATCHED_DIMS - 1, BATCHED_DIMS)
    ):
        return F.ctc_loss(*args, **kwargs)
    is_batched = scores.dim() == BATCHED_DIMS
    sequences = scores if is_batched else scores.unsqueeze(1)
    if torch.is_autocast_enabled(scores.device.type) and scores.dtype in (torch.float16, torch.bfloat16):
        sequences = sequences.float()
    losses: Tensor = ctc_loss(
        sequences,
        targets.to(scores.device, torch.int64),
        score_lengths,
        target_lengths,
        given["blank"],
        given["zero_infinity"],
    )
    if given["zero_infinity"]:
        losses = torch.where(losses == torch.inf, 0.0, losses)
    if given["reduction"] == "mean":
        return (losses / target_lengths.to(losses.dtype).clamp_min(1)).mean()
    if given["reduction"] == "sum":
        return losses.sum()
    return losses if is_batched else losses.squeeze(0)


def make_lengths(value: Any, device: torch.device) -> Tensor | None:
    """Return lengths as a tensor of one dim; None if they are neither a tensor nor numbers."""
    if isinstance(value, Tensor):
        return value.to(device, torch.int64).reshape(-1)
    is_plain = isinstance(value, Sequence) and all(isinstance(item, int) for item in value)
    return torch.tensor(list(value), dtype=torch.int64, device=device) if is_plain else None

"""`oneflow.nn`: functions of blobs. A blob is a `torch.Tensor`."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .graph import current_call
from .missing import getattr_of, refuse, refuse_given

__getattr__ = getattr_of("nn")


def relu(x: Tensor, name: str | None = None) -> Tensor:
    """Return the larger of `x` and 0, for each element."""
    del name
    return F.relu(x)


def softmax(logits: Tensor, axis: int = -1, name: str | None = None) -> Tensor:
    """Return the softmax along a dim."""
    del name
    return F.softmax(logits, axis)


def dropout(
    x: Tensor, rate: float, noise_shape: Any = None, seed: int | None = None, name: str | None = None
) -> Tensor:
    """Return `x` with a part of its elements at 0 and the others scaled up, in a train job. A predict job returns `x`.

    Args:
        x: A blob.
        rate: The probability of 0, from 0 to below 1.
        noise_shape: Not taken.
        seed: Not taken: the numbers come from PyTorch's generator, which `torch.manual_seed` seeds.
        name: It has no effect, here and in other functions.
    """
    del name
    refuse_given("flow.nn.dropout", noise_shape=noise_shape, seed=seed)
    if not 0 <= rate < 1:
        raise refuse("flow.nn.dropout", f"rate={rate!r}", "pass the share of elements that become 0, below 1")
    trains = current_call("flow.nn.dropout").trains
    return F.dropout(x, rate, training=True) if trains and rate else x


def max_pool2d(
    input: Tensor,
    ksize: int | Sequence[int],
    strides: int | Sequence[int],
    padding: str,
    data_format: str = "NCHW",
    ceil_mode: bool = False,
    name: str | None = None,
) -> Tensor:
    """Return the largest value of each window of images.

    Args:
        input: A blob of shape (batch, channels, height, width).
        ksize: Height and width of the window, or one number for both.
        strides: The steps along height and width, or one number for both.
        padding: As in `flow.layers.conv2d`; what is added is smaller than all values.
        data_format: Only "NCHW".
        ceil_mode: Whether a window may reach over the end.
    """
    del name
    require_channels_first("flow.nn.max_pool2d", input, data_format)
    window, steps = two_sizes(ksize), two_sizes(strides)
    padded, symmetric = pad_images("flow.nn.max_pool2d", input, padding, window, steps, float("-inf"))
    return F.max_pool2d(padded, window, steps, symmetric, ceil_mode=ceil_mode)


def sparse_softmax_cross_entropy_with_logits(labels: Tensor, logits: Tensor, name: str | None = None) -> Tensor:
    """Return the cross-entropy of each sample.

    Args:
        labels: The numbers of the right classes, of shape (batch,), int32 or int64.
        logits: Of shape (batch, classes).

    Returns:
        A blob of the shape of `labels`.

    Raises:
        ConfigError: The labels are no whole numbers, or the shapes do not fit.
    """
    name = "sparse_softmax_cross_entropy_with_logits"
    if labels.dtype.is_floating_point or labels.dtype == torch.bool:
        fix = f"call {name}(labels, logits), with labels in flow.int32"
        raise refuse(name, f"labels of {labels.dtype}", fix)
    if labels.shape != logits.shape[:-1]:
        found = f"labels of shape {list(labels.shape)} with logits of shape {list(logits.shape)}"
        raise refuse(name, found, "flow.reshape the labels: there is one for each row of the logits")
    losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten().long(), reduction="none")
    return losses.reshape(labels.shape)


def two_sizes(given: int | Sequence[int]) -> tuple[int, int]:
    """Return a number for the height and one for the width."""
    sizes = (given, given) if isinstance(given, int) else tuple(given)
    if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise refuse("sizes of images", f"{given!r}", "pass one number from 1 up, or two")
    return sizes[0], sizes[1]


def require_channels_first(function: str, images: Tensor, data_format: str) -> None:
    """Raise `ConfigError` for images of another layout than NCHW."""
    if data_format != "NCHW" or images.dim() != 4:
        found = f"data_format={data_format!r} and a blob of shape {list(images.shape)}"
        raise refuse(function, found, "pass images of shape (batch, channels, height, width)")


def pad_images(
    function: str, images: Tensor, padding: str, window: Sequence[int], steps: Sequence[int], value: float
) -> tuple[Tensor, tuple[int, int]]:
    """Return the padded images, and the padding that is left to the operator: equal ones need no copy."""
    vertical, horizontal = (
        _count_added(function, padding, images.shape[2 + dim], window[dim], steps[dim]) for dim in (0, 1)
    )
    symmetric = (vertical[0], horizontal[0])
    fits = all(2 * added <= size for added, size in zip(symmetric, window, strict=True))  # pooling refuses others
    if vertical[0] == vertical[1] and horizontal[0] == horizontal[1] and fits:
        return images, symmetric
    return F.pad(images, (*horizontal, *vertical), value=value), (0, 0)


def _count_added(function: str, padding: str, size: int, window: int, step: int) -> tuple[int, int]:
    """Return how many rows, or columns for dim 1, are added before and after."""
    if isinstance(padding, str) and padding.upper() == "VALID":
        return 0, 0
    if isinstance(padding, str) and padding.upper() in ("SAME", "SAME_LOWER", "SAME_UPPER"):
        needed = max((-(-size // step) - 1) * step + window - size, 0)
        less, more = needed // 2, needed - needed // 2
        return (less, more) if padding.upper() == "SAME_UPPER" else (more, less)
    raise refuse(function, f"padding={padding!r}", 'pass "SAME" or "VALID"')

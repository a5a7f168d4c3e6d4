"""`oneflow.layers`: layers that make their variables by name."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .graph import VariableSpec, current_call
from .initializers import Initializer, constant_initializer, xavier_uniform_initializer
from .missing import getattr_of, refuse, refuse_given
from .nn import pad_images, require_channels_first, two_sizes

__getattr__ = getattr_of("layers")

Activation = Callable[..., Tensor]


def dense(
    inputs: Tensor,
    units: int,
    activation: Activation | None = None,
    use_bias: bool = True,
    kernel_initializer: Initializer | None = None,
    bias_initializer: Initializer | None = None,
    *,
    trainable: bool = True,
    name: str | None = None,
    **not_taken: Any,
) -> Tensor:
    """Return `activation(inputs @ weight.T + bias)`.

    Args:
        inputs: A blob of shape (…, features), of two or more dims.
        units: The number of outputs.
        activation: A function of a blob and `name=`, such as `flow.nn.relu`. Default: none.
        use_bias: Whether there is a bias.
        kernel_initializer: Of the weight, of shape (units, features). Default: zeros, as in OneFlow.
        bias_initializer: Of the bias, of shape (units,). Default: zeros.
        trainable: Whether the optimizer steps the variables.
        name: The variables are `NAME-weight` and `NAME-bias`. Default: "Dense", "Dense_1" and so on.
        **not_taken: Regularizers and `model_distribute` are refused.

    Returns:
        A blob of shape (…, units).
    """
    refuse_given("flow.layers.dense", **not_taken)
    if inputs.dim() < 2:
        raise refuse("flow.layers.dense", f"inputs of shape {list(inputs.shape)}", "flow.reshape them to two dims")
    layer = _Layer("flow.layers.dense", "Dense", name, inputs.dtype, trainable)
    weight = layer.variable("weight", (units, inputs.shape[-1]), kernel_initializer or constant_initializer(0))
    bias = layer.variable("bias", (units,), bias_initializer or constant_initializer(0)) if use_bias else None
    return _activate(F.linear(inputs, weight, bias), activation)


def conv2d(
    inputs: Tensor,
    filters: int,
    kernel_size: int | Sequence[int] = 1,
    strides: int | Sequence[int] = 1,
    padding: str = "VALID",
    data_format: str = "NCHW",
    dilation_rate: int | Sequence[int] | None = None,
    groups: int = 1,
    activation: Activation | None = None,
    use_bias: bool = True,
    kernel_initializer: Initializer | None = None,
    bias_initializer: Initializer | None = None,
    *,
    trainable: bool = True,
    name: str | None = None,
    **not_taken: Any,
) -> Tensor:
    """Return a convolution of images.

    Args:
        inputs: A blob of shape (batch, channels, height, width).
        filters: The number of output channels.
        kernel_size: Height and width of the kernel, or one number for both.
        strides: The steps along height and width, or one number for both.
        padding: "SAME": the output has the size of the input, divided by the strides and rounded up; an odd row is
            added before. "SAME_UPPER": it is added after. "VALID": nothing is added.
        data_format: Only "NCHW".
        dilation_rate: The distance of the kernel's elements, along height and width. Default: 1.
        groups: The number of groups of channels.
        activation: As in `dense`, and so are `use_bias`, `bias_initializer` and `trainable`.
        kernel_initializer: Of the weight, of shape (filters, channels / groups, height, width). Default: Glorot's
            uniform values.
        name: The variables are `NAME-weight` and `NAME-bias`. Default: "Conv2d", "Conv2d_1" and so on.
        **not_taken: Regularizers are refused.
    """
    refuse_given("flow.layers.conv2d", **not_taken)
    require_channels_first("flow.layers.conv2d", inputs, data_format)
    kernel, steps, dilation = two_sizes(kernel_size), two_sizes(strides), two_sizes(dilation_rate or 1)
    layer = _Layer("flow.layers.conv2d", "Conv2d", name, inputs.dtype, trainable)
    shape = (filters, inputs.shape[1] // groups, *kernel)
    weight = layer.variable("weight", shape, kernel_initializer or xavier_uniform_initializer())
    bias = layer.variable("bias", (filters,), bias_initializer or constant_initializer(0)) if use_bias else None
    reach = [(size - 1) * distance + 1 for size, distance in zip(kernel, dilation, strict=True)]
    padded, symmetric = pad_images("flow.layers.conv2d", inputs, padding, reach, steps, 0.0)
    return _activate(F.conv2d(padded, weight, bias, steps, symmetric, dilation, groups), activation)


class _Layer:
    """One layer of the body that runs: it makes variables under its name."""

    def __init__(self, function: str, kind: str, name: str | None, dtype: torch.dtype, trainable: bool) -> None:
        self._call = current_call(function)
        self._name = self._call.name_layer(name, kind)
        self._dtype = dtype
        self._trainable = trainable

    def variable(self, part: str, shape: tuple[int, ...], initializer: Initializer) -> Tensor:
        name = f"{self._name}-{part}"
        return self._call.variable(VariableSpec(name, shape, self._dtype, initializer, self._trainable))


def _activate(outputs: Tensor, activation: Activation | None) -> Tensor:
    return outputs if activation is None else activation(outputs, name="activation")

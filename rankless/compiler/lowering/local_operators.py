"""Operators of the logical program that a rank runs by another function."""

from collections.abc import Callable
from typing import Any

import torch

from rankless.compiler.ir import custom_ops

aten = torch.ops.aten
rankless_ops = torch.ops.rankless

LOCAL_OPERATORS: dict[Any, Callable[..., Any]] = {
    aten.view.default: aten.reshape.default,  # a gathered or reduced value may have other strides than the logical one
    aten._unsafe_view.default: aten.reshape.default,
    rankless_ops.linear.default: custom_ops.run_linear,
    rankless_ops.linear_weight.default: custom_ops.run_linear_weight,
    rankless_ops.recurrent.default: custom_ops.run_recurrent,
    rankless_ops.recurrent_backward.default: custom_ops.run_recurrent_backward,
}
"""Operators, and the functions that run in their place."""

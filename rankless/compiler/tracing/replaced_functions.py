"""Functions that run in place of PyTorch's during capture: composite operators stay one node, others trace rightly."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # PyTorch's customary alias
from torch import Tensor
from torch.autograd import forward_ad

from rankless.compiler.ir.custom_ops import RECURRENT_FUNCTIONS, capture_attention, capture_linear, capture_recurrent
from rankless.compiler.ir.memory_order import find_memory_order


def find_replacement(function: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """Return the function that runs in place of a tensor function, or None.

    Args:
        function: The tensor function, as PyTorch passes it to a function mode.
        args: Its positional arguments.
    """
    if function is torch.Tensor.bernoulli_:
        return draw_bernoulli
    if forward_ad._current_level >= 0:
        return None  # Rankless's operators have no forward-mode formula
    if function is F.linear:
        return capture_linear
    if function is F.multi_head_attention_forward:
        return capture_attention
    kind = getattr(function, "__name__", "")
    # A packed sequence calls the same functions with other arguments. Leave those calls to PyTorch.
    if RECURRENT_FUNCTIONS.get(kind) is function and len(args) == 9 and isinstance(args[3], bool):
        return lambda *given: capture_recurrent(kind, *given)
    return None


def draw_bernoulli(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Replace `Tensor.bernoulli_`: PyTorch's traced operator would draw in the order of the dims, not of memory."""
    order = find_memory_order(tensor.shape, tensor.stride())
    (tensor if order is None else tensor.permute(order)).bernoulli_(*args, **kwargs)
    return tensor

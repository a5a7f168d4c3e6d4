"""Functions that run in place of PyTorch's during capture: composite operators stay one node, others trace rightly."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # PyTorch's customary alias
from torch import Tensor
from torch.autograd import forward_ad

from rankless.compiler.ir.ctc_operators import capture_ctc_loss
from rankless.compiler.ir.custom_ops import RECURRENT_FUNCTIONS, capture_attention, capture_linear, capture_recurrent
from rankless.compiler.ir.embedding_functions import embed, embed_bags
from rankless.compiler.ir.memory_order import find_memory_order
from rankless.compiler.tracing.fast_paths import FAST_PATHS
from rankless.compiler.tracing.row_counts import has_count

NUMBER_NEEDED = (
    *(torch.unbind, torch.Tensor.unbind, torch.chunk, torch.Tensor.chunk),
    *(torch.tensor_split, torch.Tensor.tensor_split),
)
"""Functions that make as many tensors as follows from the length of a dim, or in such lengths."""


def find_replacement(function: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """Return the function that runs in place of a tensor function, or None.

    Args:
        function: The tensor function, as PyTorch passes it to a function mode.
        args: Its positional arguments.
    """
    if function is torch.Tensor.bernoulli_:
        return draw_bernoulli
    if function in FAST_PATHS:
        return FAST_PATHS[function]
    if function in NUMBER_NEEDED and has_count(args[0].shape):
        return lambda tensor, *rest, **named: function(read_numbers_of_rows(tensor), *rest, **named)
    if forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None:
        return None  # Rankless's operators have no formula for forward mode, nor for the transforms of torch.func
    if function is F.linear:
        return capture_linear
    if function is F.multi_head_attention_forward:
        return capture_attention
    if function is F.embedding:
        return embed
    if function is F.embedding_bag:
        return embed_bags
    if function is F.ctc_loss:
        return capture_ctc_loss
    kind = getattr(function, "__name__", "")
    # A packed sequence calls the same functions with other arguments. Leave those calls to PyTorch.
    if RECURRENT_FUNCTIONS.get(kind) is function and len(args) == 9 and isinstance(args[3], bool):
        return lambda *given: capture_recurrent(kind, *given)
    return None


def read_numbers_of_rows(tensor: Tensor) -> Tensor:
    """Return rows that values have selected, as many as Python reads that there are."""
    for dim, size in enumerate(tensor.shape):
        if has_count([size]):
            tensor = tensor.narrow(dim, 0, int(size))
    return tensor


def draw_bernoulli(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Replace `Tensor.bernoulli_`: PyTorch's traced operator would draw in the order of the dims, not of memory."""
    order = find_memory_order(tensor.shape, tensor.stride())
    (tensor if order is None else tensor.permute(order)).bernoulli_(*args, **kwargs)
    return tensor

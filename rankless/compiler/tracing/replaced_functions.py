"""Functions that run in place of PyTorch's during capture: composite operators stay one node, others trace rightly."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # PyTorch's customary alias
from torch import Tensor
from torch.autograd import forward_ad

from rankless.compiler.ir.ctc_operators import capture_ctc_loss
from rankless.compiler.ir.custom_ops import RECURRENT_FUNCTIONS, capture_attention, capture_linear, capture_recurrent
from rankless.compiler.ir.memory_order import find_memory_order
from rankless.compiler.tracing.row_counts import has_count

EMBEDDING_BAG = inspect.signature(F.embedding_bag)


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
    if function in NUMBER_NEEDED and has_count(args[0].shape):
        return lambda tensor, *rest, **named: function(read_numbers_of_rows(tensor), *rest, **named)
    if forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None:
        return None  # Rankless's operators have no formula for forward mode, nor for the transforms of torch.func
    if function is F.linear:
        return capture_linear
    if function is F.multi_head_attention_forward:
        return capture_attention
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


def embed_bags(bags: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Replace `F.embedding_bag`: for bags of equal sizes, the rows of a 2-d tensor, sum the rows of an embedding.

    PyTorch's operator would get the bags as one list with offsets, which cannot be sharded.
    """
    given = EMBEDDING_BAG.bind(bags, weight, *args, **kwargs)
    given.apply_defaults()
    settings = given.arguments
    mode, factors, padding = settings["mode"], settings["per_sample_weights"], settings["padding_idx"]
    has_others = settings["offsets"] is not None or settings["max_norm"] is not None
    is_plain = not (has_others or settings["sparse"] or settings["include_last_offset"] or mode == "max")
    is_weighted = factors is not None
    if bags.dim() != 2 or bags.is_floating_point() or not is_plain or (is_weighted and mode == "mean"):
        return F.embedding_bag(bags, weight, *args, **kwargs)
    if is_weighted and factors.shape != bags.shape:
        return F.embedding_bag(bags, weight, *args, **kwargs)
    rows = F.embedding(bags, weight, padding, scale_grad_by_freq=settings["scale_grad_by_freq"])
    if is_weighted:
        rows = rows * factors.unsqueeze(-1)
    if padding is None:
        total = rows.sum(1, dtype=rows.dtype)
        return total / max(bags.shape[1], 1) if mode == "mean" else total
    is_counted = (bags != padding % weight.shape[0]).unsqueeze(-1)
    total = torch.where(is_counted, rows, 0).sum(1, dtype=rows.dtype)
    return total if mode == "sum" else total / is_counted.sum(1).clamp(min=1)


def draw_bernoulli(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Replace `Tensor.bernoulli_`: PyTorch's traced operator would draw in the order of the dims, not of memory."""
    order = find_memory_order(tensor.shape, tensor.stride())
    (tensor if order is None else tensor.permute(order)).bernoulli_(*args, **kwargs)
    return tensor

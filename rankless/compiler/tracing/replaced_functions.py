"""Functions that run in place of PyTorch's during capture: composite operators stay one node, others trace rightly."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # PyTorch's customary alias
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.modules.batchnorm import _BatchNorm

from rankless.compiler.ir.ctc_operators import capture_ctc_loss
from rankless.compiler.ir.custom_ops import (
    RECURRENT_FUNCTIONS,
    capture_attention,
    capture_linear,
    capture_recurrent,
    is_decomposed_by_autocast,
)
from rankless.compiler.ir.embedding_functions import embed, embed_bags
from rankless.compiler.ir.memory_order import find_memory_order
from rankless.compiler.tracing.fast_paths import FAST_PATHS
from rankless.compiler.tracing.symbolic_sizes import has_count

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
    is_layer = RECURRENT_FUNCTIONS.get(kind) is function and len(args) == 9 and isinstance(args[3], bool)
    if is_layer and not is_decomposed_by_autocast(kind, args[0], args[1]):
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
    if order is None:
        return tensor.bernoulli_(*args, **kwargs)
    if args and isinstance(args[0], Tensor):
        args = (args[0].expand(tensor.shape).permute(order), *args[1:])
    if isinstance(kwargs.get("p"), Tensor):
        kwargs = {**kwargs, "p": kwargs["p"].expand(tensor.shape).permute(order)}
    tensor.permute(order).bernoulli_(*args, **kwargs)
    return tensor


@contextlib.contextmanager
def average_with_tensors() -> Iterator[None]:
    """Within the context, batch norms with `momentum=None` compute the weight of a batch from a tensor.

    PyTorch reads the count in Python, so that each call would need a program of its own.
    """
    before = _BatchNorm.forward

    def forward(self: _BatchNorm, input: Tensor) -> Tensor:
        count, mean, variance = self.num_batches_tracked, self.running_mean, self.running_var
        if self.momentum is not None or not self.training or count is None or mean is None or variance is None:
            return before(self, input)
        self._check_input_dim(input)
        own_mean, own_variance = torch.zeros_like(mean), torch.ones_like(variance)
        found = F.batch_norm(input, own_mean, own_variance, self.weight, self.bias, True, 1.0, self.eps)
        with torch.no_grad():
            count.add_(1)
            share = 1.0 / count.to(mean.dtype)
            for running, own in ((mean, own_mean), (variance, own_variance)):
                running.mul_(1.0 - share).add_(own * share)
        return found

    _BatchNorm.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        _BatchNorm.forward = before  # type: ignore[method-assign]

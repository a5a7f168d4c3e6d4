"""Functions that run in place of PyTorch's during capture: composite operators stay one node, others trace rightly.

Attention layers in eval mode take the path that PyTorch takes without a trace, and compute its values.

Note [fast paths]: without gradients `nn.MultiheadAttention`, `nn.TransformerEncoderLayer` and `nn.TransformerEncoder`
run kernels of their own, whose values are others than those of the modules' Python: an additive mask counts as a mask
of truth values, a query without keys gives NaN, and the encoder gives zeros at padded positions. PyTorch's own code
decides. It asks whether a function mode or a trace is active, so the questions get the answers of a plain run. The
kernels have no shapes for a trace, and no rules; `run_attention` and the functions after it compute their values by
operators that do.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # PyTorch's customary alias
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import activation, transformer
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily

from rankless.compiler.ir.ctc_operators import capture_ctc_loss
from rankless.compiler.ir.custom_ops import (
    RECURRENT_FUNCTIONS,
    capture_attention,
    capture_attention_linear,
    capture_linear,
    capture_recurrent,
    is_decomposed_by_autocast,
)
from rankless.compiler.ir.embedding_functions import embed, embed_bags
from rankless.compiler.ir.memory_order import find_memory_order
from rankless.compiler.tracing.replaced_attributes import replace_attributes
from rankless.compiler.tracing.symbolic_sizes import has_count
from rankless.user_code import is_library

HAS_TORCH_FUNCTION = torch.overrides.has_torch_function
ENCODER_FORWARD = nn.TransformerEncoder.forward
TRACING_MODULES = ("rankless.", "torch.fx.")
"""The modules of the function modes that a trace has, and a plain run has not."""
NESTED_MODULE = transformer.__file__
"""PyTorch's file that asks `is_compiling` for the sake of a choice that changes values."""


class TakesNestedTensor(BaseException):
    """Ends PyTorch's forward pass of an encoder where it would go on with a nested tensor.

    Not an `Exception`: no `except` of a script may catch it.
    """

    def __init__(self, source: Tensor, mask: Tensor) -> None:
        super().__init__()
        self.source = source
        self.mask = mask
        """Which positions are valid, per sequence."""


def assume_aligned(_source: Tensor, _mask: Tensor) -> bool:
    """Replace `_nested_tensor_from_mask_left_aligned`: `run_encoder` makes both answers part of its values."""
    return True


def refuse_nested(source: Tensor, mask: Tensor, **_: bool) -> Tensor:
    """Replace `_nested_tensor_from_mask`: end PyTorch's pass, and let `run_encoder` go on."""
    raise TakesNestedTensor(source, mask)


def run_encoder(
    self: nn.TransformerEncoder,
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Tensor:
    """Replace `nn.TransformerEncoder.forward`, with its arguments: run a nested tensor as a padded one with a mask."""
    try:
        return ENCODER_FORWARD(self, src, mask, src_key_padding_mask, is_causal)
    except TakesNestedTensor as taken:
        nested = taken
    # A nested tensor has as many positions as the mask, from the first one: PyTorch checks that the mask has the same.
    padding = torch.arange(nested.mask.shape[1], device=nested.mask.device) >= nested.mask.sum(1, keepdim=True)
    given = zeroed = padding
    if getattr(self, "mask_check", True):
        is_aligned = (padding == ~nested.mask).all()
        given, zeroed = ~nested.mask, padding & is_aligned
    output = nested.source
    for layer in self.layers:
        # A sequence without a valid position has no keys, and gives NaN; its zeros follow at the end.
        output = layer(output, src_mask=None, is_causal=is_causal is True, src_key_padding_mask=given)
    output = output.masked_fill(zeroed.unsqueeze(-1), 0.0)
    return output if self.norm is None else self.norm(output)


def run_attention(
    query: Tensor,
    _key: Tensor,
    _value: Tensor,
    embed_dim: int,
    heads: int,
    weight: Tensor,
    bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Replace `_native_multi_head_attention`, with its arguments: self-attention of a batch of sequences."""
    rows, length, _ = query.shape
    if torch.is_autocast_enabled(query.device.type):  # autocast casts all arguments of this operator
        query = query.to(torch.get_autocast_dtype(query.device.type))
    packed = capture_attention_linear(query, weight, bias)
    q, k, v = (item.unflatten(-1, (heads, -1)).transpose(1, 2) for item in packed.chunk(3, dim=-1))
    masked = None
    if mask is not None:
        masked = mask.to(torch.bool)
        masked = masked.view(rows, 1, 1, length) if mask_type == 1 else masked
    attended, weights = attend(q, k, v, masked, need_weights)
    output = capture_attention_linear(attended.transpose(1, 2).reshape(rows, length, embed_dim), out_weight, out_bias)
    if weights is not None and average_weights:
        weights = weights.mean(1)
    return output, weights


def attend(q: Tensor, k: Tensor, v: Tensor, masked: Tensor | None, need_weights: bool) -> tuple[Tensor, Tensor | None]:
    """Return attention, and its weights if they are needed. A query all of whose keys are masked gives NaN."""
    if need_weights:
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        weights = F.softmax(scores if masked is None else scores.masked_fill(masked, -torch.inf), dim=-1)
        return weights @ v, weights
    if masked is None:
        return F.scaled_dot_product_attention(q, k, v), None
    attended = F.scaled_dot_product_attention(q, k, v, ~masked)
    return attended.masked_fill(masked.all(-1, keepdim=True), torch.nan), None


def run_encoder_layer(
    src: Tensor,
    embed_dim: int,
    heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm1_weight: Tensor,
    norm1_bias: Tensor,
    norm2_weight: Tensor,
    norm2_bias: Tensor,
    weight1: Tensor,
    bias1: Tensor,
    weight2: Tensor,
    bias2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    """Replace `_transformer_encoder_layer_fwd`, with its arguments; its sums have the dtype of what attention gives."""

    def norm1(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm1_weight, norm1_bias, eps)

    def norm2(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm2_weight, norm2_bias, eps)

    def feed_forward(x: Tensor) -> Tensor:
        hidden = capture_attention_linear(x, weight1, bias1)
        return capture_attention_linear(F.gelu(hidden) if use_gelu else F.relu(hidden), weight2, bias2)

    x = norm1(src) if norm_first else src
    x, _ = run_attention(
        x, x, x, embed_dim, heads, qkv_weight, qkv_bias, out_weight, out_bias, mask, False, True, mask_type
    )
    x = (x + src).to(x.dtype)
    if norm_first:
        fed = feed_forward(norm2(x))
        return (fed + x).to(fed.dtype)
    x = norm1(x)
    fed = feed_forward(x)
    return norm2((fed + x).to(fed.dtype))


FAST_PATHS: dict[Any, Callable[..., Any]] = {
    torch._native_multi_head_attention: run_attention,
    torch._transformer_encoder_layer_fwd: run_encoder_layer,
    torch._nested_tensor_from_mask_left_aligned: assume_aligned,
    torch._nested_tensor_from_mask: refuse_nested,
}
"""What runs in place of the functions of fast paths."""


def has_torch_function(values: Any) -> bool:
    """Replace `torch.overrides.has_torch_function`: answer as without the function mode of the trace."""
    modes = _get_current_function_mode_stack()
    with contextlib.ExitStack() as stack:
        if all(type(mode).__module__.startswith(TRACING_MODULES) for mode in modes):
            for _ in modes:
                stack.enter_context(_pop_mode_temporarily())
        return HAS_TORCH_FUNCTION(values)


def is_compiling() -> bool:
    """Replace `torch.compiler.is_compiling`: no for the script and for PyTorch's encoder, yes for other libraries.

    Libraries skip checks that read values, and promise the same result. A script may compute something else.
    """
    file = sys._getframe(1).f_code.co_filename
    return file != NESTED_MODULE and is_library(file)


@contextlib.contextmanager
def take_paths_of_plain_run() -> Iterator[None]:
    """Within the context, PyTorch's modules decide as in a plain run; see Note [fast paths]."""
    with replace_attributes(
        (torch.overrides, "has_torch_function", has_torch_function),
        (torch.compiler, "is_compiling", is_compiling),
        (activation, "_is_make_fx_tracing", lambda: False),
        (nn.TransformerEncoder, "forward", run_encoder),
    ):
        yield


NUMBER_NEEDED = (
    *(torch.unbind, torch.Tensor.unbind, torch.chunk, torch.Tensor.chunk),
    *(torch.tensor_split, torch.Tensor.tensor_split),
)
"""Functions that make as many tensors as follows from the length of a dim, or in such lengths."""

COMPOSITE: dict[Any, Callable[..., Any]] = {
    F.linear: capture_linear,
    F.multi_head_attention_forward: capture_attention,
    F.embedding: embed,
    F.embedding_bag: embed_bags,
    F.ctc_loss: capture_ctc_loss,
}
"""Functions of several operators that stay one node."""


def find_replacement(function: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """Return the function that runs in place of a tensor function, or None."""
    if function is torch.Tensor.bernoulli_:
        return draw_bernoulli
    if function in FAST_PATHS:
        return FAST_PATHS[function]
    if function in NUMBER_NEEDED and has_count(args[0].shape):
        return lambda tensor, *rest, **named: function(read_numbers_of_rows(tensor), *rest, **named)
    if forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None:
        return None  # Rankless's operators have no formula for forward mode, nor for the transforms of torch.func
    if function in COMPOSITE:
        return COMPOSITE[function]
    kind = getattr(function, "__name__", "")
    # A packed sequence calls the same functions with other arguments. Leave those calls to PyTorch.
    if RECURRENT_FUNCTIONS.get(kind) is not function or len(args) != 9 or not isinstance(args[3], bool):
        return None
    x, state, _, _, layers, dropout, trains = args[:7]
    if x.dtype is torch.float64 or not is_decomposed_by_autocast(kind, x, state):  # it casts nothing in float64
        return lambda *given: capture_recurrent(kind, *given)
    return functools.partial(run_layers, kind) if trains and dropout and layers > 1 else None


def run_layers(kind: str, x: Tensor, state: Any, weights: Sequence[Tensor], *settings: Any) -> tuple[Tensor, ...]:
    """Run recurrent layers one by one, each operator by operator, with dropout between them.

    PyTorch's own formula, which a trace would take, leaves out the dropout (`torch._decomp`, `_rnn_helper`). The
    arguments are those of `torch.lstm` and similar functions.
    """
    has_biases, layers, dropout, trains, bidirectional, batch_first = settings
    sequence, final = x.transpose(0, 1) if batch_first else x, list[Sequence[Tensor]]()
    states = state if kind == "lstm" else [state]
    parts = zip(*(each.chunk(layers) for each in states), strict=True)
    for own in parts:
        if final:
            sequence = F.dropout(sequence, dropout, training=True)
        first = len(final) * len(weights) // layers
        own_weights = weights[first : first + len(weights) // layers]
        first_state = own if kind == "lstm" else own[0]
        sequence, *last = RECURRENT_FUNCTIONS[kind](
            sequence, first_state, own_weights, has_biases, 1, 0.0, trains, bidirectional, False
        )
        final.append(last)
    return (sequence.transpose(0, 1) if batch_first else sequence, *map(torch.cat, zip(*final, strict=True)))


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

    with replace_attributes((_BatchNorm, "forward", forward)):
        yield

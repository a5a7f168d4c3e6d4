"""Composite operators that the captured program keeps as one node, because decomposing them loses structure.

PyTorch flattens `linear` over a batch of sequences around a matrix product, and unrolls a recurrent layer into
thousands of nodes. As PyTorch custom operators, each stays a single node of the program.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # PyTorch's customary alias
from torch import Tensor

from rankless.errors import CaptureError

MATRIX_DIMS = 2

# Note [double backward]: the backward of `linear` consists of operators that are differentiable themselves. A second
# gradient must pass through it. An opaque backward made gradient penalties wrong by 50 to 77 percent. The backward of a
# recurrent layer is one node too, but consists of PyTorch's own operators where a second gradient may follow.


def run_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `torch.nn.functional.linear` as one matrix product, however `x` lies in memory.

    For rows that do not follow each other, such as those of a transposed sequence, PyTorch computes one product per
    matrix, which takes twice as long as to copy them first.
    """
    if x.dim() <= MATRIX_DIMS or x.is_contiguous():
        return F.linear(x, weight, bias)
    return F.linear(x.flatten(0, -2), weight, bias).view(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op("rankless::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `torch.nn.functional.linear` as one node."""
    return F.linear(x, weight, bias)


@linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _save_linear_inputs(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight)


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad
    return (
        linear(grad, weight.t().conj(), None) if needs_x else None,
        linear_weight(grad, x.conj()) if needs_weight else None,
        grad.sum(list(range(grad.dim() - 1))) if needs_bias else None,
    )


linear.register_autograd(_linear_backward, setup_context=_save_linear_inputs)


def run_linear_weight(grad: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute the gradient of the weight of `linear`: one matrix product over all rows."""
    return torch.mm(grad.flatten(0, -2).t(), x.flatten(0, -2), out=out)


def add_linear_weight(total: Tensor, grad: Tensor, x: Tensor) -> None:
    """Add the gradient of the weight of `linear` to a sum of such, in one pass over its memory."""
    total.addmm_(grad.flatten(0, -2).t(), x.flatten(0, -2))


@torch.library.custom_op("rankless::linear_weight", mutates_args=())
def linear_weight(grad: Tensor, x: Tensor) -> Tensor:
    """Compute the gradient of the weight of `linear` as one node, so that any leading dim can be sharded."""
    return run_linear_weight(grad, x)


@linear_weight.register_fake
def _(grad: Tensor, x: Tensor) -> Tensor:
    return x.new_empty((grad.shape[-1], x.shape[-1]))


def _save_linear_weight_inputs(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _linear_weight_backward(ctx: Any, by_weight: Tensor) -> tuple[Tensor | None, Tensor | None]:
    grad, x = ctx.saved_tensors
    return linear(x.conj(), by_weight, None), linear(grad.conj(), by_weight.t(), None)


linear_weight.register_autograd(_linear_weight_backward, setup_context=_save_linear_weight_inputs)

RECURRENT_FUNCTIONS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "lstm": torch.lstm,
    "gru": torch.gru,
    "rnn_tanh": torch.rnn_tanh,
    "rnn_relu": torch.rnn_relu,
}
"""The recurrent layers that stay one node, by the name of the PyTorch function."""


AUTOGRAD_KEYS = (
    torch._C.DispatchKey.AutogradFunctionality,
    torch._C.DispatchKey.AutogradOther,
    torch._C.DispatchKey.AutogradNestedTensor,
)


def run_recurrent(
    kind: str, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], layout: Sequence[int]
) -> list[Tensor]:
    """Run time-first recurrent layers without dropout; `layout` is (has biases, number of layers, bidirectional).

    Without dropout, training decides one thing: cuDNN keeps what the backward pass needs.
    """
    has_biases, layers, bidirectional = layout
    state = tuple(states) if kind == "lstm" else states[0]
    results = RECURRENT_FUNCTIONS[kind](
        x, state, list(weights), bool(has_biases), layers, 0.0, torch.is_grad_enabled(), bool(bidirectional), False
    )
    return [result.clone() for result in results]


@torch.library.custom_op("rankless::recurrent", mutates_args=())
def recurrent(
    kind: str, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], layout: Sequence[int]
) -> list[Tensor]:
    """Run a stack of recurrent layers over a time-first sequence as one node; return output and final states."""
    with torch.no_grad():
        return run_recurrent(kind, x, states, weights, layout)


@recurrent.register_fake
def _(kind: str, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], layout: Sequence[int]) -> list[Tensor]:
    width = states[0].shape[-1] * (2 if layout[2] else 1)
    return [x.new_empty((*x.shape[:-1], width)), *(torch.empty_like(state) for state in states)]


def run_recurrent_backward(
    kind: str,
    grads: Sequence[Tensor],
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    layout: Sequence[int],
) -> list[Tensor]:
    """Return the gradients of `run_recurrent` for x, states and weights; recompute the forward pass."""
    # A local program runs below autograd. Include autograd's dispatch keys again for this one operator.
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in AUTOGRAD_KEYS:
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in (x, *states, *weights)]
        count = 1 + len(states)
        results = run_recurrent(kind, leaves[0], leaves[1:count], leaves[count:], layout)
        found = torch.autograd.grad(results, leaves, list(grads))
    return [grad.contiguous() for grad in found]


@torch.library.custom_op("rankless::recurrent_backward", mutates_args=())
def recurrent_backward(
    kind: str,
    grads: Sequence[Tensor],
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    layout: Sequence[int],
) -> list[Tensor]:
    """Compute the gradients of `recurrent` as one node."""
    return run_recurrent_backward(kind, grads, x, states, weights, layout)


@recurrent_backward.register_fake
def _(
    kind: str,
    grads: Sequence[Tensor],
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    layout: Sequence[int],
) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in (x, *states, *weights)]


def _save_recurrent_inputs(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    kind, x, states, weights, layout = inputs
    ctx.kind, ctx.layout, ctx.state_count = kind, list(layout), len(states)
    ctx.save_for_backward(x, *states, *weights, *output)


def _recurrent_backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    x, *rest = ctx.saved_tensors
    outputs = rest[-(1 + ctx.state_count) :]
    states, weights = rest[: ctx.state_count], rest[ctx.state_count : -(1 + ctx.state_count)]
    filled = [torch.zeros_like(output) if grad is None else grad for grad, output in zip(grads, outputs, strict=True)]
    compute = differentiate_recurrent if torch.is_grad_enabled() else recurrent_backward
    grad_x, *others = compute(ctx.kind, filled, x, states, weights, ctx.layout)
    return None, grad_x, others[: ctx.state_count], others[ctx.state_count :], None


def differentiate_recurrent(
    kind: str,
    grads: Sequence[Tensor],
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    layout: Sequence[int],
) -> list[Tensor | None]:
    """Return the gradients of `recurrent` as results of PyTorch's own operators, which can be differentiated again."""
    inputs = [x, *states, *weights]
    needed = [tensor for tensor in inputs if tensor.requires_grad]
    with torch._C.DisableTorchFunction():  # during capture PyTorch's functions are replaced by ours
        results = run_recurrent(kind, x, states, weights, layout)
        found = iter(torch.autograd.grad(results, needed, grads, create_graph=True, allow_unused=True))
    return [next(found) if tensor.requires_grad else None for tensor in inputs]


recurrent.register_autograd(_recurrent_backward, setup_context=_save_recurrent_inputs)


def capture_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Replace `F.linear` during capture: one node for batches of sequences, PyTorch's own operators otherwise."""
    if x.dim() < 3 or torch.is_autocast_enabled(x.device.type):
        return F.linear(x, weight, bias)
    result: Tensor = linear(x, weight, bias)
    return result


PLAIN_LINEAR = F.linear


def capture_attention(*args: Any, **kwargs: Any) -> Any:
    """Run `F.multi_head_attention_forward` during capture, and keep each of its linear layers as one node.

    The function calls `linear` by its name in `torch.nn.functional`, so this name stands for ours meanwhile.
    """
    F.linear = capture_attention_linear  # type: ignore[assignment]  # PyTorch names the parameter `input`
    try:
        return F.multi_head_attention_forward(*args, **kwargs)
    finally:
        F.linear = PLAIN_LINEAR


def capture_attention_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Replace `F.linear` within attention: one node, also where PyTorch has merged time and batch to rows.

    Autocast does not know this node, so the casts that it makes for `F.linear` are made here.
    """
    if x.dim() < 2:
        return PLAIN_LINEAR(x, weight, bias)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = cast_for_autocast(x, dtype), cast_for_autocast(weight, dtype)
        bias = None if bias is None else cast_for_autocast(bias, dtype)
    result: Tensor = linear(x, weight, bias)
    return result


def cast_for_autocast(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a value as autocast passes it to `F.linear`: floating-point types but float64 are cast."""
    return value.to(dtype) if value.is_floating_point() and value.dtype != torch.float64 else value


def require_dropout_of_generator(kind: str, x: Tensor, dropout: float) -> None:
    """Raise `CaptureError` if the plain script lets cuDNN draw the dropout between recurrent layers.

    cuDNN draws from a state of its own, which several workers cannot draw parts from.
    """
    if torch.cudnn_is_acceptable(x):
        raise CaptureError(
            expected="dropout between recurrent layers that is drawn from PyTorch's generator",
            found=f"{kind} with dropout={dropout} on a GPU, where cuDNN draws it from a state of its own",
            fix="call the layer within `with torch.backends.cudnn.flags(enabled=False):`, on one device too; "
            "or make the layers one by one, with nn.Dropout between them",
        )


def is_decomposed_by_autocast(kind: str, x: Tensor, state: Tensor | Sequence[Tensor]) -> bool:
    """Return whether PyTorch computes a recurrent layer operator by operator under autocast, each with its own cast.

    On the CPU oneDNN has one operator for LSTM without projections, and on a GPU cuDNN for all layers: their arguments
    are cast.
    """
    if x.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
        return False
    if kind != "lstm" or not torch.backends.mkldnn.enabled or x.dtype is not torch.float32 or not x.numel():
        return True
    return state[0].shape[-1] != state[1].shape[-1]


def capture_recurrent(
    kind: str,
    x: Tensor,
    state: Tensor | tuple[Tensor, ...],
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Replace `torch.lstm` and similar functions during capture; dropout between layers follows PyTorch.

    The signature is PyTorch's. Raises `CaptureError` where cuDNN would draw the dropout on one device.
    """
    states = list(state) if isinstance(state, tuple | list) else [state]
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x = cast_for_autocast(x, dtype)
        states, weights = ([cast_for_autocast(item, dtype) for item in items] for items in (states, weights))
    sequence = x.transpose(0, 1) if batch_first else x
    layout = [int(has_biases), layers, int(bidirectional)]
    if not (train and dropout and layers > 1):
        sequence, *finals = recurrent(kind, sequence, states, list(weights), layout)
    else:
        require_dropout_of_generator(kind, x, dropout)
        directions = 2 if bidirectional else 1
        per_layer = len(weights) // layers
        finished: list[list[Tensor]] = []
        for layer in range(layers):
            sequence, *last = recurrent(
                kind,
                sequence,
                [layers_state[layer * directions : (layer + 1) * directions] for layers_state in states],
                list(weights[layer * per_layer : (layer + 1) * per_layer]),
                [int(has_biases), 1, int(bidirectional)],
            )
            finished.append(last)
            if layer < layers - 1:
                sequence = F.dropout(sequence, dropout, training=True)
        finals = [torch.cat(parts) for parts in zip(*finished, strict=True)]
    return (sequence.transpose(0, 1) if batch_first else sequence, *finals)

"""Rules for products: matrices, batches of matrices, linear layers, convolutions, embeddings, recurrent layers."""

from collections.abc import Iterator
from typing import Any

import torch

from rankless.compiler.ir import custom_ops  # noqa: F401  # registers the operators used below
from rankless.compiler.rules.pattern import (
    make_letters,
    make_masked_rule,
    make_pattern_rule,
    partial_sum_strategies,
    split_strategies,
)
from rankless.compiler.rules.strategy import OperatorCall, ShardingRule, Strategy, logical_shape
from rankless.parallel.tensor_placement import Partial, Placement, Replicate, Shard

aten = torch.ops.aten
rankless_ops = torch.ops.rankless


def make_bias_pattern(call: OperatorCall, product: str) -> str:
    """Return the pattern of a product with a bias. The bias is added once, so only output dims can be sharded.

    The bias has the letters of the dims along which it does not broadcast.
    """
    (shape,) = call.output_shapes
    _, out = product.split("->")
    sizes = logical_shape(call.inputs[0])
    offset = len(out) - len(sizes)
    bias = "".join(out[offset + dim] if size == shape[offset + dim] else "." for dim, size in enumerate(sizes))
    return f"{bias},{product}"


def addmm_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of bias + a @ b."""
    yield from split_strategies(call, make_bias_pattern(call, "m.,.n->mn"))


def baddbmm_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of a batch of biases + a @ b."""
    yield from split_strategies(call, make_bias_pattern(call, "bm.,b.n->bmn"))


def linear_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of x @ weight.T + bias, over any leading dims of x."""
    leading = make_letters(len(logical_shape(call.inputs[0])))[:-1]
    yield from split_strategies(call, f"{leading}.,Z.,Z->{leading}Z")
    if call.slots[2] is None:
        yield from split_strategies(call, f"{leading}Y,.Y,->{leading}.")


def linear_weight_pattern(call: OperatorCall) -> str:
    """Return the pattern of the weight's gradient: a sum over the leading dims."""
    leading = make_letters(len(logical_shape(call.inputs[0])))[:-1]
    return f"{leading}Y,{leading}Z->YZ"


def embedding_pattern(call: OperatorCall) -> str:
    """Return the pattern of rows of a table by index; every dim of the indices can be sharded."""
    text = make_letters(len(logical_shape(call.inputs[1])))
    return f"*,{text}->{text}."


def embedding_backward_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of the table's gradient.

    Sharded indices give partial sums, unless the gradient is divided by the frequency of an index.
    """
    if not call.argument("scale_grad_by_freq"):
        text = make_letters(len(logical_shape(call.inputs[1])))
        yield from split_strategies(call, f"{text}.,{text}->..")
    yield from partial_sum_strategies(call, (0,))


def recurrent_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of a time-first recurrent layer: the batch (dim 1) of sequence and states can be sharded."""
    yield from recurrent_batch_strategies(call, gradients=0)


def recurrent_backward_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of its gradients: sequence and states sharded with the batch, weights as partial sums."""
    yield from recurrent_batch_strategies(call, gradients=len(call.argument("grads")))


def recurrent_batch_strategies(call: OperatorCall, gradients: int) -> Iterator[Strategy]:
    """Yield the strategy of a recurrent layer or its gradient for every present sharding of the batch."""
    states, weights = len(call.argument("states")), len(call.argument("weights"))
    tried = set()
    for position, placement in enumerate(call.current_placements):
        is_on_batch = isinstance(placement, Shard) and placement.dim == 1
        if not is_on_batch or position >= gradients + 1 + states or placement in tried:
            continue
        tried.add(placement)
        batch: tuple[Placement, ...] = (placement,)
        inputs = batch * (gradients + 1 + states) + (Replicate(),) * weights
        outputs = batch * (1 + states) + ((Partial(),) * weights if gradients else ())
        yield Strategy(inputs, outputs)


RULES: dict[Any, ShardingRule] = {
    aten.mm.default: make_pattern_rule("mk,kn->mn", (0,), (1,)),
    aten.bmm.default: make_pattern_rule("bmk,bkn->bmn", (0,), (1,)),
    aten.mv.default: make_pattern_rule("mk,k->m", (0,), (1,)),
    aten.dot.default: make_pattern_rule("k,k->", (0,), (1,)),
    aten.addmm.default: addmm_strategies,
    aten.baddbmm.default: baddbmm_strategies,
    rankless_ops.linear.default: linear_strategies,
    rankless_ops.linear_weight.default: make_pattern_rule(linear_weight_pattern, (0,), (1,)),
    aten.convolution.default: make_pattern_rule("b*,*,*->b*"),
    aten.convolution_backward.default: make_masked_rule(lambda _: "b*,b*,*->b*,*,*"),
    aten.embedding.default: make_pattern_rule(embedding_pattern),
    aten.embedding_dense_backward.default: embedding_backward_strategies,
    rankless_ops.recurrent.default: recurrent_strategies,
    rankless_ops.recurrent_backward.default: recurrent_backward_strategies,
}

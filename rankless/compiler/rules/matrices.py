"""Products: matrices, batches of matrices, linear layers, convolutions, embeddings, recurrent layers."""

from collections.abc import Iterator
from typing import Any

import torch

from rankless.compiler.ir import custom_ops  # noqa: F401  # registers the operators named below
from rankless.compiler.rules.pattern import (
    make_letters,
    make_masked_rule,
    make_pattern_rule,
    partial_sum_strategies,
    split_strategies,
)
from rankless.compiler.rules.strategy import OperatorCall, ShardingRule, Strategy, logical_shape
from rankless.parallel.placement import Partial, Placement, Replicate, Shard

aten = torch.ops.aten
rankless_ops = torch.ops.rankless


def make_bias_pattern(call: OperatorCall, product: str) -> str:
    """A bias is added once, so only the dims of the output may be split; it has those it is not stretched along."""
    (shape,) = call.output_shapes
    _, out = product.split("->")
    sizes = logical_shape(call.inputs[0])
    offset = len(out) - len(sizes)
    bias = "".join(out[offset + dim] if size == shape[offset + dim] else "." for dim, size in enumerate(sizes))
    return f"{bias},{product}"


def addmm_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """bias + a @ b."""
    yield from split_strategies(call, make_bias_pattern(call, "m.,.n->mn"))


def baddbmm_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """batch of biases + a @ b."""
    yield from split_strategies(call, make_bias_pattern(call, "bm.,b.n->bmn"))


def linear_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """x @ weight.T + bias, over any leading dims of x."""
    leading = make_letters(len(logical_shape(call.inputs[0])))[:-1]
    yield from split_strategies(call, f"{leading}.,Z.,Z->{leading}Z")
    if call.slots[2] is None:
        yield from split_strategies(call, f"{leading}Y,.Y,->{leading}.")


def linear_weight_pattern(call: OperatorCall) -> str:
    """Its weight's gradient: a sum over the leading dims."""
    leading = make_letters(len(logical_shape(call.inputs[0])))[:-1]
    return f"{leading}Y,{leading}Z->YZ"


def embedding_pattern(call: OperatorCall) -> str:
    """Rows of a table by index; every dim of the indices may be split."""
    text = make_letters(len(logical_shape(call.inputs[1])))
    return f"*,{text}->{text}."


def embedding_backward_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """The table's gradient; split indices give partial sums, unless they are divided by how often an index occurs."""
    if not call.argument("scale_grad_by_freq"):
        text = make_letters(len(logical_shape(call.inputs[1])))
        yield from split_strategies(call, f"{text}.,{text}->..")
    yield from partial_sum_strategies(call, (0,))


def recurrent_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """A recurrent layer over a time-first sequence: the batch (dim 1) of sequence and states may be split."""
    yield from recurrent_batch_strategies(call, gradients=0)


def recurrent_backward_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Its gradients: those of sequence and states split with the batch, those of weights are partial sums."""
    yield from recurrent_batch_strategies(call, gradients=len(call.argument("grads")))


def recurrent_batch_strategies(call: OperatorCall, gradients: int) -> Iterator[Strategy]:
    """The strategy of a recurrent layer or its gradient for every way the batch lies split now."""
    states, weights = len(call.argument("states")), len(call.argument("weights"))
    tried = set()
    for position, placement in enumerate(call.current_placements):
        on_batch = isinstance(placement, Shard) and placement.dim == 1
        if not on_batch or position >= gradients + 1 + states or placement in tried:
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

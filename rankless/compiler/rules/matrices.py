"""Products: matrices, batches of matrices, linear layers, convolutions, embeddings, recurrent layers."""

from collections.abc import Iterator
from typing import Any

import torch

from rankless.compiler.ir import custom_ops  # noqa: F401  # registers the operators named below
from rankless.compiler.rules.pattern import by_pattern, letters, masked, split, sums
from rankless.compiler.rules.strategy import Call, Rule, Strategy, shape_of
from rankless.parallel.placement import Partial, Placement, Replicate, Shard

aten = torch.ops.aten
ours = torch.ops.rankless


def bias_pattern(call: Call, product: str) -> str:
    """A bias is added once, so only the dims of the output may be split; it has those it is not stretched along."""
    (shape,) = call.output_shapes
    _, out = product.split("->")
    sizes = shape_of(call.inputs[0])
    offset = len(out) - len(sizes)
    bias = "".join(out[offset + dim] if size == shape[offset + dim] else "." for dim, size in enumerate(sizes))
    return f"{bias},{product}"


def addmm(call: Call) -> Iterator[Strategy]:
    """bias + a @ b."""
    yield from split(call, bias_pattern(call, "m.,.n->mn"))


def baddbmm(call: Call) -> Iterator[Strategy]:
    """batch of biases + a @ b."""
    yield from split(call, bias_pattern(call, "bm.,b.n->bmn"))


def linear(call: Call) -> Iterator[Strategy]:
    """x @ weight.T + bias, over any leading dims of x."""
    leading = letters(len(shape_of(call.inputs[0])))[:-1]
    yield from split(call, f"{leading}.,Z.,Z->{leading}Z")
    if call.slots[2] is None:
        yield from split(call, f"{leading}Y,.Y,->{leading}.")


def linear_weight(call: Call) -> str:
    """Its weight's gradient: a sum over the leading dims."""
    leading = letters(len(shape_of(call.inputs[0])))[:-1]
    return f"{leading}Y,{leading}Z->YZ"


def embedding(call: Call) -> str:
    """Rows of a table by index; every dim of the indices may be split."""
    text = letters(len(shape_of(call.inputs[1])))
    return f"*,{text}->{text}."


def embedding_back(call: Call) -> Iterator[Strategy]:
    """The table's gradient; split indices give partial sums, unless they are divided by how often an index occurs."""
    if not call.argument("scale_grad_by_freq"):
        text = letters(len(shape_of(call.inputs[1])))
        yield from split(call, f"{text}.,{text}->..")
    yield from sums(call, (0,))


def recurrent(call: Call) -> Iterator[Strategy]:
    """A recurrent layer over a time-first sequence: the batch (dim 1) of sequence and states may be split."""
    yield from recurrent_split(call, gradients=0)


def recurrent_back(call: Call) -> Iterator[Strategy]:
    """Its gradients: those of sequence and states split with the batch, those of weights are partial sums."""
    yield from recurrent_split(call, gradients=len(call.argument("grads")))


def recurrent_split(call: Call, gradients: int) -> Iterator[Strategy]:
    """The strategy of a recurrent layer or its gradient for every way the batch lies split now."""
    states, weights = len(call.argument("states")), len(call.argument("weights"))
    tried = set()
    for position, placement in enumerate(call.current):
        on_batch = isinstance(placement, Shard) and placement.dim == 1
        if not on_batch or position >= gradients + 1 + states or placement in tried:
            continue
        tried.add(placement)
        batch: tuple[Placement, ...] = (placement,)
        inputs = batch * (gradients + 1 + states) + (Replicate(),) * weights
        outputs = batch * (1 + states) + ((Partial(),) * weights if gradients else ())
        yield Strategy(inputs, outputs)


RULES: dict[Any, Rule] = {
    aten.mm.default: by_pattern("mk,kn->mn", (0,), (1,)),
    aten.bmm.default: by_pattern("bmk,bkn->bmn", (0,), (1,)),
    aten.mv.default: by_pattern("mk,k->m", (0,), (1,)),
    aten.dot.default: by_pattern("k,k->", (0,), (1,)),
    aten.addmm.default: addmm,
    aten.baddbmm.default: baddbmm,
    ours.linear.default: linear,
    ours.linear_weight.default: by_pattern(linear_weight, (0,), (1,)),
    aten.convolution.default: by_pattern("b*,*,*->b*"),
    aten.convolution_backward.default: masked(lambda _: "b*,b*,*->b*,*,*"),
    aten.embedding.default: by_pattern(embedding),
    aten.embedding_dense_backward.default: embedding_back,
    ours.recurrent.default: recurrent,
    ours.recurrent_backward.default: recurrent_back,
}

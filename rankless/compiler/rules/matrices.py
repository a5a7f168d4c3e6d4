"""Rules for products: matrices, batches of matrices, linear layers, convolutions, recurrent layers."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from rankless.compiler.ir import custom_ops  # noqa: F401  # registers the operators used below
from rankless.compiler.rules.half_precision import ACCUMULATED_IN, widen_sums
from rankless.compiler.rules.pattern import (
    LETTERS,
    make_letters,
    make_masked_rule,
    make_pattern_rule,
    require_rows,
    split_strategies,
)
from rankless.compiler.rules.strategy import (
    GraphBuilder,
    LocalValue,
    OperatorCall,
    ShardingRule,
    Strategy,
    logical_shape,
)
from rankless.parallel.tensor_placement import Partial, Placement, Replicate, Shard

aten = torch.ops.aten
rankless_ops = torch.ops.rankless

MOST_POINTS_COMPARED_DIRECTLY = 25
"""With more points in a set, `cdist` computes Euclidean distances by a matrix product."""


def make_bias_pattern(call: OperatorCall, product: str) -> str:
    """Return the pattern of a product with a bias that divides output dims alone.

    The bias has the letters of the dims along which it does not broadcast.
    """
    (shape,) = call.output_shapes
    _, out = product.split("->")
    sizes = logical_shape(call.inputs[0])
    offset = len(out) - len(sizes)
    bias = "".join(out[offset + dim] if size == shape[offset + dim] else "." for dim, size in enumerate(sizes))
    return f"{bias},{product}"


def contraction_strategies(call: OperatorCall, pattern: str, bias: int = 0) -> Iterator[Strategy]:
    """Yield a pattern's strategies, in which the bias, at this position in `call.inputs`, is a partial sum.

    The pattern divides the contracted dims. A replicated bias becomes a partial sum that rank 0 alone holds.
    """
    for strategy in split_strategies(call, pattern):
        inputs = list(strategy.inputs)
        inputs[bias] = Partial()
        yield replace(strategy, inputs=tuple(inputs))


def addmm_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of bias + a @ b."""
    yield from split_strategies(call, make_bias_pattern(call, "m.,.n->mn"))
    yield from contraction_strategies(call, "*,.k,k.->..")


def baddbmm_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of a batch of biases + a @ b."""
    yield from split_strategies(call, make_bias_pattern(call, "bm.,b.n->bmn"))
    yield from contraction_strategies(call, "*,..k,.k.->...")


def addmv_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of bias + a @ v."""
    yield from split_strategies(call, make_bias_pattern(call, "m.,.->m"))
    yield from contraction_strategies(call, "*,.k,k->.")


def addr_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of bias + the outer product of two vectors."""
    yield from split_strategies(call, make_bias_pattern(call, "m,n->mn"))


def addbmm_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of bias + the sum of a batch of products; the batch is contracted too."""
    yield from split_strategies(call, make_bias_pattern(call, ".m.,..n->mn"))
    if call.node.meta["val"].dtype.is_floating_point:
        yield from contraction_strategies(call, "*,b.k,bk.->..")


def cdist_pattern(call: OperatorCall) -> str:
    """Return the pattern of distances between two sets of points; batch dims of size one broadcast."""
    (shape,) = call.output_shapes
    batch = make_letters(len(shape) - 2)
    texts = []
    for node in call.inputs:
        sizes = logical_shape(node)[:-2]
        aligned = batch[len(batch) - len(sizes) :]
        texts.append("".join("." if size == 1 else letter for letter, size in zip(aligned, sizes, strict=True)))
    return f"{texts[0]}Y.,{texts[1]}Z.->{batch}YZ"


def lower_cdist(
    builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], _kwargs: dict[str, Any]
) -> LocalValue:
    """Compute distances in the way that PyTorch chooses for the logical number of points: its rounding is another."""
    points = [logical_shape(node)[-2] for node in call.inputs]
    use_product = args[3] == 1 or (not args[3] and max(points) > MOST_POINTS_COMPARED_DIRECTLY)
    return builder.call(call.operator, *args[:3], 1 if use_product else 2)


def cdist_backward_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of the gradient of the first set: a sum over the second."""
    shapes = [logical_shape(node) for node in call.inputs]
    if shapes[1][:-2] == shapes[2][:-2]:
        batch = make_letters(len(shapes[0]) - 2)
        yield from split_strategies(call, f"{batch}YZ,{batch}Y.,{batch}Z.,{batch}YZ->{batch}Y.")


def trilinear_pattern(call: OperatorCall) -> str:
    """Return the pattern of a product of three tensors that broadcast along given dims, summed over given dims."""
    expanded = [list(call.argument(f"expand{place}")) for place in (1, 2, 3)]
    count = len(logical_shape(call.inputs[0])) + len(expanded[0])
    summed = [dim % count for dim in call.argument("sumdim")]
    texts = ["".join(LETTERS[dim] for dim in range(count) if dim not in dims) for dims in expanded]
    return ",".join(texts) + "->" + "".join(LETTERS[dim] for dim in range(count) if dim not in summed)


def linear_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of x @ weight.T + bias, over any leading dims of x."""
    leading = make_letters(len(logical_shape(call.inputs[0])))[:-1]
    yield from split_strategies(call, f"{leading}.,Z.,Z->{leading}Z")
    contracted = "." * len(leading)
    if call.slots[2] is None:
        yield from split_strategies(call, f"{leading}Y,.Y,->{leading}.")
    else:
        yield from contraction_strategies(call, f"{contracted}Y,.Y,*->{contracted}.", bias=2)


def linear_weight_pattern(call: OperatorCall) -> str:
    """Return the pattern of the weight's gradient: a sum over the leading dims."""
    leading = make_letters(len(logical_shape(call.inputs[0])))[:-1]
    return f"{leading}Y,{leading}Z->YZ"


def convolution_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield sharding of a convolution on its batch, on the channels of its result, and on those of its input.

    The last gives partial sums. In half precision they would be computed in float32, and that kernel may choose another
    memory layout, so there are none.
    """
    yield from split_strategies(call, "b*,*,*->b*")
    if call.argument("groups") == 1:
        yield from require_rows(channel_strategies)(call)


def channel_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield those strategies of a convolution that divide channels. PyTorch's kernels need one channel at least."""
    result, given = get_channel_texts(call, logical_shape(call.inputs[1]))
    yield from split_strategies(call, f"*,{result},C->.C*")
    if call.node.meta["val"].dtype in ACCUMULATED_IN:
        return
    output = "." * len(call.output_shapes[0])
    if call.slots[2] is None:
        yield from split_strategies(call, f".C*,{given},->{output}")
    else:
        yield from contraction_strategies(call, f".C*,{given},*->{output}", bias=2)


def convolution_backward_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield strategies of its gradients, for the same dims."""
    yield from make_masked_rule(lambda _: "b*,b*,*->b*,*,*")(call)
    if call.argument("groups") == 1:
        shapes = [logical_shape(node) for node in call.inputs]
        result, given = get_channel_texts(call, shapes[2])
        partial = "." * len(shapes[1])
        by_result = make_masked_rule(lambda _: f".C*,*,{result}->{partial},{result},C")
        by_given = make_masked_rule(lambda _: f"*,.C*,{given}->.C*,{given},=")
        yield from require_rows(by_result)(call)
        yield from require_rows(by_given)(call)


def get_channel_texts(call: OperatorCall, weight: Sequence[int]) -> tuple[str, str]:
    """Return the patterns of a weight whose channels of the result, and whose channels of the input, are sharded."""
    rest = "." * (len(weight) - 2)
    first, second = f"C.{rest}", f".C{rest}"
    return (second, first) if call.argument("transposed") else (first, second)


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
    aten.mm.default: widen_sums(make_pattern_rule("mk,kn->mn", (0,), (1,))),
    aten.bmm.default: widen_sums(make_pattern_rule("bmk,bkn->bmn", (0,), (1,))),
    aten.mv.default: widen_sums(make_pattern_rule("mk,k->m", (0,), (1,))),
    aten.vdot.default: widen_sums(make_pattern_rule("k,k->", (0,), (1,))),
    aten.dot.default: widen_sums(make_pattern_rule("k,k->", (0,), (1,))),
    aten.addmm.default: widen_sums(addmm_strategies),
    aten.baddbmm.default: widen_sums(baddbmm_strategies),
    aten.addmv.default: widen_sums(addmv_strategies),
    aten.addr.default: addr_strategies,
    aten.addbmm.default: widen_sums(addbmm_strategies),
    aten._cdist_forward.default: make_pattern_rule(cdist_pattern, lower=lower_cdist),
    aten._cdist_backward.default: cdist_backward_strategies,
    aten._trilinear.default: widen_sums(make_pattern_rule(trilinear_pattern)),
    rankless_ops.linear.default: widen_sums(linear_strategies),
    rankless_ops.linear_weight.default: make_pattern_rule(linear_weight_pattern, (0,), (1,)),
    aten.convolution.default: convolution_strategies,
    aten.convolution_backward.default: convolution_backward_strategies,
    rankless_ops.recurrent.default: recurrent_strategies,
    rankless_ops.recurrent_backward.default: recurrent_backward_strategies,
}

"""Rules for operators on batches of matrices: every batch dim can be sharded, rows and columns cannot."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from rankless.compiler.rules.pattern import LETTERS, split_strategies
from rankless.compiler.rules.strategy import (
    GraphBuilder,
    LocalValue,
    OperatorCall,
    ShardingRule,
    Strategy,
    logical_shape,
)
from rankless.compiler.tracing.symbolic_sizes import size_hint
from rankless.parallel.tensor_placement import Partial, Replicate

aten = torch.ops.aten

MATRIX_DIMS: dict[Any, tuple[tuple[int, ...], tuple[int, ...]]] = {
    aten.linalg_inv_ex.default: ((2,), (2, 0)),
    aten.linalg_cholesky_ex.default: ((2,), (2, 0)),
    aten.cholesky_solve.default: ((2, 2), (2,)),
    aten.cholesky_inverse.default: ((2,), (2,)),
    aten.linalg_solve_triangular.default: ((2, 2), (2,)),
    aten.linalg_lu.default: ((2,), (2, 2, 2)),
    aten.linalg_lu_factor_ex.default: ((2,), (2, 1, 0)),
    aten.linalg_lu_solve.default: ((2, 1, 2), (2,)),
    aten.lu_unpack.default: ((2, 1), (2, 2, 2)),
    aten.linalg_qr.default: ((2,), (2, 2)),
    aten.linalg_householder_product.default: ((2, 1), (2,)),
    aten._linalg_svd.default: ((2,), (2, 1, 2)),
    aten._linalg_eigh.default: ((2,), (1, 2)),
    aten.linalg_pinv.atol_rtol_tensor: ((2, 0, 0), (2,)),
    aten.linalg_matrix_exp.default: ((2,), (2,)),
}
"""How many last dims of each input and of each output belong to one matrix, vector or number."""


def make_batch_strategies(call: OperatorCall, inputs: Sequence[int], outputs: Sequence[int]) -> Iterator[Strategy]:
    """Yield sharding on every batch dim; an input without that dim, or of size one there, is replicated.

    So is an output without it. PyTorch gives an absent output the shape (0,).
    """
    batches = [
        (*logical_shape(node),)[: len(logical_shape(node)) - count] if node is not None else ()
        for node, count in zip(call.slots, inputs, strict=True)
    ]
    most = max(map(len, batches))
    texts = [
        make_batch_letters(batch, most) + "." * count if node is not None else ""
        for node, batch, count in zip(call.slots, batches, inputs, strict=True)
    ]
    results = []
    for shape, count in zip(call.output_shapes, outputs, strict=True):
        is_present = len(shape) >= count and len(shape) - count <= most and shape != (0,)
        results.append(make_batch_letters(shape[: len(shape) - count], most) + "." * count if is_present else "=")
    for strategy in split_strategies(call, ",".join(texts) + "->" + ",".join(results)):
        placements = tuple(Replicate() if isinstance(item, Partial) else item for item in strategy.outputs)
        yield replace(strategy, outputs=placements)


def make_batch_letters(batch: Sequence[int], most: int) -> str:
    """Return the letters of batch dims, which broadcast from the last of `most` dims."""
    offset = most - len(batch)
    return "".join("." if size == 1 else LETTERS[offset + dim] for dim, size in enumerate(batch))


def make_matrix_rule(inputs: Sequence[int], outputs: Sequence[int]) -> ShardingRule:
    """Return the rule of an operator with these numbers of dims per matrix."""
    return lambda call: make_batch_strategies(call, inputs, outputs)


# Note [transposed factors]: `det`, `slogdet` and `solve` factorize the transpose of a contiguous matrix, and autograd
# chose the formula of the backward by the logical layout. A shard must therefore be contiguous exactly if the logical
# value is. These operators are only split where it is, for a piece of one row of another layout may be contiguous too.


def is_contiguous(call: OperatorCall) -> bool:
    """Return whether the first input lies in contiguous memory."""
    value = call.inputs[0].meta["val"]
    expected = 1
    for size, stride in zip(reversed(value.shape), reversed(value.strides), strict=True):
        if size_hint(size) != 1 and size_hint(stride) != expected:
            return False
        expected *= size_hint(size)
    return True


def make_factorizing_rule(outputs: Sequence[int]) -> ShardingRule:
    """Return the rule of an operator that factorizes by the layout; see Note [transposed factors]."""

    def rule(call: OperatorCall) -> Iterator[Strategy]:
        if is_contiguous(call):
            for strategy in make_batch_strategies(call, (2,), outputs):
                yield replace(strategy, lower=lower_on_contiguous)

    return rule


def solve_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield sharding on every batch dim of `solve`, with one or several right-hand sides per matrix."""
    if not is_contiguous(call):
        return
    matrices, right = (logical_shape(node) for node in call.inputs)
    sides = 1 if len(right) == 1 or right == matrices[:-1] else 2
    for strategy in make_batch_strategies(call, (2, sides), (sides, 2, 1, 0)):
        yield replace(strategy, lower=lower_on_contiguous)


def lower_on_contiguous(
    builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> LocalValue:
    """Call the operator on contiguous memory, in which the logical value lies."""
    return builder.call(call.operator, builder.call(aten.contiguous.default, args[0]), *args[1:], **kwargs)


def cross_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield sharding on every dim but that of the vectors."""
    (shape,) = call.output_shapes
    dim = call.argument("dim") % len(shape)
    sizes = [logical_shape(node) for node in call.inputs]
    letters = ["." if position == dim else LETTERS[position] for position in range(len(shape))]
    texts = [
        "".join("." if size == 1 else letters[len(shape) - len(item) + place] for place, size in enumerate(item))
        for item in sizes
    ]
    yield from split_strategies(call, ",".join(texts) + "->" + "".join(letters))


RULES: dict[Any, ShardingRule] = {
    **{operator: make_matrix_rule(*dims) for operator, dims in MATRIX_DIMS.items()},
    aten._linalg_det.default: make_factorizing_rule((0, 2, 1)),
    aten._linalg_slogdet.default: make_factorizing_rule((0, 0, 2, 1)),
    aten._linalg_solve_ex.default: solve_strategies,
    aten.linalg_cross.default: cross_strategies,
}

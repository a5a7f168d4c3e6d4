"""Rules for operators on batches of matrices: every batch dim can be sharded, and the right-hand sides of a system."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from rankless.compiler.rules.pattern import LETTERS, make_letters, split_strategies
from rankless.compiler.rules.strategy import (
    GraphBuilder,
    LocalValue,
    OperatorCall,
    ShardingRule,
    Strategy,
    logical_shape,
    make_replicated_strategy,
)
from rankless.compiler.tracing.symbolic_sizes import size_hint
from rankless.parallel.tensor_placement import Partial, Replicate

aten = torch.ops.aten

MATRIX_DIMS: dict[Any, tuple[tuple[int, ...], tuple[int, ...]]] = {
    aten.linalg_inv_ex.default: ((2,), (2, 0)),
    aten.linalg_cholesky_ex.default: ((2,), (2, 0)),
    aten.cholesky_inverse.default: ((2,), (2,)),
    aten.linalg_lu.default: ((2,), (2, 2, 2)),
    aten.linalg_lu_factor_ex.default: ((2,), (2, 1, 0)),
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


def right_side_strategies(call: OperatorCall, position: int, dim: int = -1) -> Iterator[Strategy]:
    """Yield sharding of the right-hand sides of a system of equations, which are independent.

    Args:
        call: The operator.
        position: Which tensor argument has the right-hand sides.
        dim: The dim along which they lie.
    """
    sizes = logical_shape(call.inputs[position])
    text = make_letters(len(sizes), [place for place in range(len(sizes)) if place != dim % len(sizes)])
    inputs = ["*"] * len(call.slots)
    inputs[position] = text
    others = ["="] * (len(call.output_shapes) - 1)
    solution = "." * (len(call.output_shapes[0]) - len(text)) + text
    yield from split_strategies(call, ",".join(inputs) + "->" + ",".join([solution, *others]))


def make_system_rule(inputs: Sequence[int], position: int, outputs: Sequence[int] = (2,)) -> ShardingRule:
    """Return the rule of an operator that solves a system of equations for each matrix."""

    def strategies(call: OperatorCall) -> Iterator[Strategy]:
        yield from make_batch_strategies(call, inputs, outputs)
        has_sides = any(described.name == "left" for described in call.operator._schema.arguments)
        is_left = not has_sides or call.argument("left")  # otherwise the matrix stands right of the solution
        yield from right_side_strategies(call, position, -1 if is_left else -2)

    return strategies


def make_matrix_rule(inputs: Sequence[int], outputs: Sequence[int]) -> ShardingRule:
    """Return the rule of an operator with these numbers of dims per matrix."""
    return lambda call: make_batch_strategies(call, inputs, outputs)


# Note [transposed factors]: `det`, `slogdet` and `solve` factorize the transpose of a contiguous matrix, and autograd
# chose the formula of the backward by the logical layout. The layout of a piece, or of a gathered value, may differ:
# one row is contiguous in more layouts, and a gathered value no longer overlaps itself. So these operators get matrices
# whose rows are contiguous exactly if the logical value is contiguous. Matrices of one entry are their own transpose.


# Note [solutions of conjugate matrices]: `solve_triangular` lays out its solution by columns, or by rows for a matrix
# in columns that is only marked as conjugate. A gathered one has no such mark, so the solution is laid out afterwards.


def is_contiguous(node: fx.Node) -> bool:
    """Return whether the logical value of a node lies in contiguous memory."""
    value = node.meta["val"]
    expected = 1
    for size, stride in zip(reversed(value.shape), reversed(value.strides), strict=True):
        if size_hint(size) != 1 and size_hint(stride) != expected:
            return False
        expected *= size_hint(size)
    return True


def factorizing_strategies(call: OperatorCall, inputs: Sequence[int], outputs: Sequence[int]) -> Iterator[Strategy]:
    """Yield the strategies of an operator that factorizes by the layout; see Note [transposed factors]."""
    for strategy in make_batch_strategies(call, inputs, outputs):
        yield replace(strategy, lower=lower_with_layout)
    yield replace(make_replicated_strategy(call), lower=lower_with_layout)


def make_factorizing_rule(outputs: Sequence[int]) -> ShardingRule:
    """Return the rule of an operator on one batch of matrices that factorizes by the layout."""
    return lambda call: factorizing_strategies(call, (2,), outputs)


def solve_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield sharding on every batch dim of `solve`, with one or several right-hand sides per matrix."""
    matrices, right = (logical_shape(node) for node in call.inputs)
    sides = 1 if len(right) == 1 or right == matrices[:-1] else 2
    yield from factorizing_strategies(call, (2, sides), (sides, 2, 1, 0))
    if sides > 1:
        for strategy in right_side_strategies(call, 1):
            yield replace(strategy, lower=lower_with_layout)


def lower_with_layout(
    builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> LocalValue:
    """Call the operator on matrices by rows or by columns, as the logical value decides."""
    matrices = lay_out(builder, args[0], by_rows=is_contiguous(call.inputs[0]))
    return builder.call(call.operator, matrices, *args[1:], **kwargs)


def lower_to_layout(
    builder: GraphBuilder, call: OperatorCall, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> LocalValue:
    """Call the operator, and lay out its result as the logical result; see Note [solutions of conjugate matrices]."""
    return lay_out(builder, builder.call(call.operator, *args, **kwargs), by_rows=is_contiguous(call.node))


def lay_out(builder: GraphBuilder, matrices: Any, *, by_rows: bool) -> fx.Node:
    """Return the matrices by rows or by columns: themselves, if they lie so."""
    if by_rows:
        return builder.call(aten.contiguous.default, matrices)
    columns = builder.call(aten.contiguous.default, builder.call(aten.transpose.int, matrices, -2, -1))
    return builder.call(aten.transpose.int, columns, -2, -1)


def solve_triangular_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield sharding on the batch dims and on the right-hand sides."""
    for strategy in (*make_system_rule((2, 2), 1)(call), make_replicated_strategy(call)):
        yield replace(strategy, lower=lower_to_layout)


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
    aten.cholesky_solve.default: make_system_rule((2, 2), 0),
    aten.linalg_solve_triangular.default: solve_triangular_strategies,
    aten.linalg_lu_solve.default: make_system_rule((2, 1, 2), 2),
    aten.triangular_solve.default: make_system_rule((2, 2), 0, (2, 2)),
    aten._linalg_det.default: make_factorizing_rule((0, 2, 1)),
    aten._linalg_slogdet.default: make_factorizing_rule((0, 0, 2, 1)),
    aten._linalg_solve_ex.default: solve_strategies,
    aten.linalg_cross.default: cross_strategies,
}

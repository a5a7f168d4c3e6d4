"""How a value of a program depends on the batch dim: per sample, a sum over the batch, independent of it, or mixed.

See `batch_dim_analysis`, Note [split in time].
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import sympy  # type: ignore[import-untyped]  # it has no stubs
import torch
from torch import fx

from rankless.compiler.ir.logical_program import LogicalValue, is_random_node
from rankless.compiler.rules.pointwise import RULES as LIKE_RULES
from rankless.compiler.rules.pointwise import is_pointwise
from rankless.compiler.rules.strategy import logical_shape
from rankless.compiler.tracing.symbolic_sizes import list_traced_counts
from rankless.parallel.tensor_placement import Partial, Placement, Replicate, Shard

aten = torch.ops.aten
GROWTH_FACTOR = 3
"""The second capture has this many times the rows of the first."""

NLL_OPS = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
MEAN_REDUCTION = 1
BATCH_NORM_OPS = (
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
)
FACTORY_OPS = (
    aten.full.default,
    aten.zeros.default,
    aten.ones.default,
    aten.empty.memory_format,
    aten.scalar_tensor.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    *(operator for operator in LIKE_RULES if "new_" in str(operator)),
)
"""Operators that fill a new tensor with one value and ignore the values of their input."""
MUL_OPS = (aten.mul.Tensor, aten.mul.Scalar)
DIV_OPS = (aten.div.Tensor, aten.div.Scalar)
ADD_OPS = (aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar)
VIEW_OPS = (aten.view.default, aten._unsafe_view.default)
CLAMP_OPS = (aten.clamp_min.default, aten.clamp.default)
CONVERSION_OPS = (*VIEW_OPS, aten._to_copy.default, aten.clone.default, aten.lift_fresh_copy.default)


LITERAL_KEY = "a number of rows"
"""The key of literal normalizers: their numbers are compared at every call, when they are known."""


@dataclass(frozen=True)
class Normalizer:
    """The divisor of a sum over the batch: a value of the program, or (`is_literal`) a number in it.

    `node` is where the division happens, or the mean itself. Equal normalizers have equal keys. The divisor is the
    value plus `offset`, and at least `minimum`.
    """

    key: str
    node: fx.Node
    is_literal: bool
    offset: float = 0.0
    minimum: float | None = None


@dataclass(frozen=True)
class BatchSharded:
    """Each row of the value depends on its own row of the batch alone; `normalizer` is what each was divided by.

    With `outer_size` above one, the dim is another dim of that size flattened together with the batch, which is the
    inner one. The rows of one sample then lie apart, and the placement only says that each can be computed alone.

    With `is_number` each row holds its own number, as `torch.arange(len(images))` does. It may only select rows.
    """

    placement: Shard
    normalizer: Normalizer | None = None
    outer_size: int = 1
    is_number: bool = False


@dataclass(frozen=True)
class BatchIndependent:
    """The value does not depend on the batch. Along `uniform_dims` all entries are equal, or drawn alike."""

    uniform_dims: frozenset[int] = frozenset()


@dataclass(frozen=True)
class BatchSum:
    """A sum of terms, each a sum over the batch divided by its normalizer (None: not divided).

    `has_constant` means that a term is added which depends on parameters alone, and `is_shifted` one without gradient.
    """

    normalizers: frozenset[Normalizer | None]
    has_constant: bool = False
    is_shifted: bool = False


@dataclass(frozen=True)
class BatchMixed:
    """The value mixes rows of the batch, so parts of the batch cannot give it: the reason, and the script line."""

    reason: str
    line: str


BatchDimKind = BatchSharded | BatchIndependent | BatchSum | BatchMixed


def make_batch_shard(dim: int, length: int) -> Shard:
    """Return the shard of a dim that is split where the batch is split: after one part in GROWTH_FACTOR."""
    return Shard(dim, (length // GROWTH_FACTOR, length - length // GROWTH_FACTOR))


def compute_growth(ours: float, theirs: float) -> float:
    """Return how much a number grew: exactly GROWTH_FACTOR or its inverse if it is that up to rounding."""
    found = ours / theirs if theirs else 0.0
    return next((known for known in (GROWTH_FACTOR, 1 / GROWTH_FACTOR) if abs(found - known) < 1e-12), found)


def get_argument(node: fx.Node, position: int, name: str) -> Any:
    """Return an argument of a call by position or name."""
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)


def is_plain_sum(kind: BatchDimKind) -> TypeGuard[BatchSum]:
    """Return whether a value is a sum over the batch that is not divided, but for a term without gradient."""
    return isinstance(kind, BatchSum) and kind.normalizers == {None} and not kind.has_constant


def is_plain_rows(kind: BatchDimKind) -> TypeGuard[BatchSharded]:
    """Return whether a value has one row for each of the batch, divided by nothing, and no numbers of rows."""
    return isinstance(kind, BatchSharded) and kind == BatchSharded(kind.placement)


def has_gradient(node: fx.Node) -> bool:
    """Return whether gradients pass through a value: none do through whole numbers and truth values."""
    value = node.meta["val"]
    return not isinstance(value, LogicalValue) or value.dtype.is_floating_point or value.dtype.is_complex


def is_divided_by_rows(node: fx.Node, growth: list[float]) -> bool:
    """Return whether an operator divides by a number of rows, given how much its numbers grow with the rows."""
    return (node.target in DIV_OPS and growth == [GROWTH_FACTOR]) or (
        node.target in MUL_OPS and growth == [1 / GROWTH_FACTOR]
    )


def list_numbers(node: fx.Node) -> list[tuple[int, str]]:
    """Return the positions and names of an operator's arguments that are numbers."""
    operator = node.target
    assert isinstance(operator, torch._ops.OpOverload), operator
    # A number may stand for a tensor, as in mul.Tensor(x, 0.5). Sizes and dims are no values.
    return [
        (position, described.name)
        for position, described in enumerate(operator._schema.arguments)
        if any(word in str(described.type) for word in ("number", "float", "Tensor"))
    ]


def find_growth(node: fx.Node, counterpart: fx.Node) -> list[float]:
    """Return by how much those plain numbers of an operator grow that grow with the rows."""
    found = []
    for place in list_numbers(node):
        ours, theirs = get_argument(node, *place), get_argument(counterpart, *place)
        if isinstance(ours, int | float) and isinstance(theirs, int | float) and float(ours) != float(theirs):
            found.append(compute_growth(float(ours), float(theirs)))
    return found


def computes_with_count(node: fx.Node) -> bool:
    """Return whether an operator computes with the number of rows that values select, which differs between calls."""
    is_operator = isinstance(node.target, torch._ops.OpOverload)
    return is_operator and any(list_traced_counts(get_argument(node, *place)) for place in list_numbers(node))


def find_multiple(value: Any) -> dict[sympy.Symbol, sympy.Expr] | None:
    """Return of which counts a number is a sum, and how many times of each; None for any other number."""
    counts = list_traced_counts(value)
    if not counts:
        return None
    polynomial = value.node._expr.as_poly(*counts)
    if polynomial is None or any(sum(powers) != 1 for powers in polynomial.monoms()):
        return None
    return {count: polynomial.coeff_monomial(count) for count in counts}


def to_placement(kind: BatchDimKind) -> Placement:
    """Return the placement of a value of this kind when the batch is split."""
    return (
        kind.placement if isinstance(kind, BatchSharded) else Partial() if isinstance(kind, BatchSum) else Replicate()
    )


def is_compatible(kind: BatchDimKind, wanted: Placement) -> bool:
    """Return whether a value satisfies a placement without communication."""
    if isinstance(kind, BatchSharded):
        return wanted == kind.placement
    if isinstance(kind, BatchIndependent):
        return isinstance(wanted, Replicate) or (isinstance(wanted, Shard) and wanted.dim in kind.uniform_dims)
    return False


def is_uniform_along(item: fx.Node, kind: BatchDimKind, dim: int, count: int) -> bool:
    """Return whether an input, broadcast to `count` dims, has equal entries along one of them."""
    sizes = logical_shape(item)
    own = dim - (count - len(sizes))
    return own < 0 or sizes[own] == 1 or (isinstance(kind, BatchIndependent) and own in kind.uniform_dims)


def find_uniform_dims(node: fx.Node, kinds: Mapping[fx.Node, BatchDimKind]) -> list[int]:
    """Return the dims along which all entries of a batch-independent value are equal."""
    value = node.meta["val"]
    if isinstance(value, tuple | list) or not isinstance(node.target, torch._ops.OpOverload):
        return []
    count = len(value.shape)
    inputs = [(item, kinds[item]) for item in node.all_input_nodes]
    is_uniform = all(
        isinstance(kind, BatchIndependent) and len(kind.uniform_dims) == len(logical_shape(item))
        for item, kind in inputs
    )
    is_drawn = is_random_node(node) and node.target is not aten.randperm.default
    if node.target in FACTORY_OPS or (
        is_uniform and (is_drawn or is_pointwise(node.target) or node.target in CONVERSION_OPS)
    ):
        return list(range(count))
    if node.target is aten.embedding.default:
        indices = kinds[node.all_input_nodes[1]]
        return [
            dim for dim in range(count - 1) if isinstance(indices, BatchIndependent) and dim in indices.uniform_dims
        ]
    if node.target is not aten.expand.default and not is_pointwise(node.target):
        return []
    return [dim for dim in range(count) if all(is_uniform_along(item, kind, dim, count) for item, kind in inputs)]

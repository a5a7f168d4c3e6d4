"""What a value of a program is to a batch cut in two: rows apart, a sum over rows, neither, or lost.

See `row_inference`, Note [cut in time].
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rankless.compiler.rules.pointwise import RULES as LIKE_RULES
from rankless.compiler.rules.strategy import logical_shape
from rankless.parallel.placement import Partial, Placement, Replicate, Shard

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
"""Operators that fill a new tensor with one value, whatever stands in the one they take."""
MUL_OPS = (aten.mul.Tensor, aten.mul.Scalar)
DIV_OPS = (aten.div.Tensor, aten.div.Scalar)
ADD_OPS = (aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar)
VIEW_OPS = (aten.view.default, aten._unsafe_view.default)
CLAMP_OPS = (aten.clamp_min.default, aten.clamp.default)
CONVERSION_OPS = (*VIEW_OPS, aten._to_copy.default, aten.clone.default, aten.lift_fresh_copy.default)


@dataclass(frozen=True)
class Normalizer:
    """What a sum over rows was divided by: a value of the program, or (`literal`) a number that stands in it.

    `node` is where it stands; of a mean it is the mean itself. `key` tells equal divisors apart from others.
    """

    key: str
    node: fx.Node
    is_literal: bool
    offset: float = 0.0
    minimum: float | None = None


@dataclass(frozen=True)
class BatchSharded:
    """Each row of it depends on its own row of the batch alone; `over` is what each was divided by.

    With `outer` above one the dim is so many others flattened together with the batch, which is the inner one: rows
    that belong to one row of the batch then lie apart, and the placement says only that each may be computed alone.
    """

    placement: Shard
    normalizer: Normalizer | None = None
    outer_size: int = 1


@dataclass(frozen=True)
class BatchIndependent:
    """Does not depend on the batch. Along the dims in `alike` all entries are the same, or drawn alike."""

    uniform_dims: frozenset[int] = frozenset()


@dataclass(frozen=True)
class BatchSum:
    """A sum of terms, each a sum over rows divided by its divisor (None: by nothing).

    `constant`: and a term without rows.
    """

    normalizers: frozenset[Normalizer | None]
    has_constant: bool = False


@dataclass(frozen=True)
class BatchMixed:
    """Parts of a batch do not give it: why, and where in the script."""

    reason: str
    line: str


BatchDimKind = BatchSharded | BatchIndependent | BatchSum | BatchMixed


def make_batch_shard(dim: int, length: int) -> Shard:
    """A dim cut where the batch is cut: after one part in FACTOR."""
    return Shard(dim, (length // GROWTH_FACTOR, length - length // GROWTH_FACTOR))


def make_literal_key() -> str:
    """Numbers of rows are compared when they are known: at every call."""
    return "a number of rows"


def compute_growth(ours: float, theirs: float) -> float:
    """How a number grew, exactly FACTOR or its inverse where it is that but for rounding."""
    found = ours / theirs if theirs else 0.0
    return next((known for known in (GROWTH_FACTOR, 1 / GROWTH_FACTOR) if abs(found - known) < 1e-12), found)


def get_argument(node: fx.Node, position: int, name: str) -> Any:
    """An argument of a call by position or name."""
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)


def to_placement(kind: BatchDimKind) -> Placement:
    """How a value of this kind lies when the batch is cut."""
    return (
        kind.placement if isinstance(kind, BatchSharded) else Partial() if isinstance(kind, BatchSum) else Replicate()
    )


def is_compatible(kind: BatchDimKind, wanted: Placement) -> bool:
    """Whether a value may be taken as placed in this way without anything being exchanged."""
    if isinstance(kind, BatchSharded):
        return wanted == kind.placement
    if isinstance(kind, BatchIndependent):
        return isinstance(wanted, Replicate) or (isinstance(wanted, Shard) and wanted.dim in kind.uniform_dims)
    return False


def is_uniform_along(item: fx.Node, kind: BatchDimKind, dim: int, count: int) -> bool:
    """Whether an input, stretched to `count` dims, is the same all along one of them."""
    sizes = logical_shape(item)
    own = dim - (count - len(sizes))
    return own < 0 or sizes[own] == 1 or (isinstance(kind, BatchIndependent) and own in kind.uniform_dims)

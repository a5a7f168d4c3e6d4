"""What a value of a program is to a batch cut in two: rows apart, a sum over rows, neither, or lost.

See `row_inference`, Note [cut in time].
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rankless.compiler.rules.pointwise import RULES as LIKE_RULES
from rankless.compiler.rules.strategy import shape_of
from rankless.parallel.placement import Partial, Placement, Replicate, Shard

aten = torch.ops.aten
FACTOR = 3
"""The second capture has this many times the rows of the first."""

NLL = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
MEAN = 1
BATCH_NORM = (
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
)
MADE = (
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
MULTIPLIED = (aten.mul.Tensor, aten.mul.Scalar)
DIVIDED = (aten.div.Tensor, aten.div.Scalar)
SHIFTED = (aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar)
VIEWED = (aten.view.default, aten._unsafe_view.default)
CLAMPED = (aten.clamp_min.default, aten.clamp.default)
CONVERTED = (*VIEWED, aten._to_copy.default, aten.clone.default, aten.lift_fresh_copy.default)


@dataclass(frozen=True)
class Divisor:
    """What a sum over rows was divided by: a value of the program, or (`literal`) a number that stands in it.

    `node` is where it stands; of a mean it is the mean itself. `key` tells equal divisors apart from others.
    """

    key: str
    node: fx.Node
    literal: bool
    plus: float = 0.0
    least: float | None = None


@dataclass(frozen=True)
class Rows:
    """Each row of it depends on its own row of the batch alone; `over` is what each was divided by.

    With `outer` above one the dim is so many others flattened together with the batch, which is the inner one: rows
    that belong to one row of the batch then lie apart, and the placement says only that each may be computed alone.
    """

    placement: Shard
    over: Divisor | None = None
    outer: int = 1


@dataclass(frozen=True)
class Fixed:
    """Does not depend on the batch. Along the dims in `alike` all entries are the same, or drawn alike."""

    alike: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Sum:
    """A sum of terms, each a sum over rows divided by its divisor (None: by nothing).

    `constant`: and a term without rows.
    """

    divisors: frozenset[Divisor | None]
    constant: bool = False


@dataclass(frozen=True)
class Lost:
    """Parts of a batch do not give it: why, and where in the script."""

    reason: str
    line: str


Kind = Rows | Fixed | Sum | Lost


def grouped(dim: int, length: int) -> Shard:
    """A dim cut where the batch is cut: after one part in FACTOR."""
    return Shard(dim, (length // FACTOR, length - length // FACTOR))


def literal_key() -> str:
    """Numbers of rows are compared when they are known: at every call."""
    return "a number of rows"


def ratio(ours: float, theirs: float) -> float:
    """How a number grew, exactly FACTOR or its inverse where it is that but for rounding."""
    found = ours / theirs if theirs else 0.0
    return next((known for known in (FACTOR, 1 / FACTOR) if abs(found - known) < 1e-12), found)


def argument_at(node: fx.Node, position: int, name: str) -> Any:
    """An argument of a call by position or name."""
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)


def placed_as(kind: Kind) -> Placement:
    """How a value of this kind lies when the batch is cut."""
    return kind.placement if isinstance(kind, Rows) else Partial() if isinstance(kind, Sum) else Replicate()


def lies_so(kind: Kind, wanted: Placement) -> bool:
    """Whether a value may be taken as placed in this way without anything being exchanged."""
    if isinstance(kind, Rows):
        return wanted == kind.placement
    if isinstance(kind, Fixed):
        return isinstance(wanted, Replicate) or (isinstance(wanted, Shard) and wanted.dim in kind.alike)
    return False


def same_along(item: fx.Node, kind: Kind, dim: int, count: int) -> bool:
    """Whether an input, stretched to `count` dims, is the same all along one of them."""
    sizes = shape_of(item)
    own = dim - (count - len(sizes))
    return own < 0 or sizes[own] == 1 or (isinstance(kind, Fixed) and own in kind.alike)

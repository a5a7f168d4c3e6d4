"""Decide by brute force whether a case can be split: run the operator on pieces of its arguments and join the results.

This shares nothing with the sharding rules. For each way to divide the other tensors (whole, or along a dim of the same
size), the results on the pieces, and the gradients, must give eager PyTorch's on the whole tensors, concatenated along
one dim or added.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from operator_database import DatabaseCase, Split, without_seeds
from torch import Tensor

from rankless.parallel.tensor_placement import split_lengths

RANKS = 2
TOLERANCE = 1e-9
MAX_ASSIGNMENTS = 32
UNCHECKED = ("lu_unpack", "lu_solve", "linalg.lu_solve", "linalg.ldl_solve")
"""Operators whose kernels trust pivots: on other pieces than they belong to, they write beyond their memory."""
Joint = int | None
"""How a result is joined: concatenated along a dim, or added (None)."""


@dataclass(frozen=True)
class Computed:
    """The results of an operator, and the gradients of its arguments."""

    results: list[Tensor]
    gradients: list[Tensor | None]


@without_seeds()
def can_be_split(case: DatabaseCase, split: Split) -> bool:
    """Return whether a case can be computed on pieces of the tensors that `split` divides."""
    sizes = {item.shape[dim] for item, dim in zip(case.tensors, split.dims, strict=True) if dim is not None}
    (size,) = sizes
    lengths = split_lengths(size, RANKS)
    if case.variant in UNCHECKED:
        return False
    try:
        whole = call(case, case.tensors)
    except Exception:
        return False
    return any(is_right(case, whole, dims, lengths) for dims in assignments(case.tensors, split, size))


def assignments(tensors: Sequence[Tensor], split: Split, size: int) -> Iterator[tuple[int | None, ...]]:
    """Yield ways to divide all tensors, in which those of `split` are divided as there."""
    options: list[list[int | None]] = [
        [dim] if dim is not None else [None, *(place for place, other in enumerate(item.shape) if other == size)]
        for item, dim in zip(tensors, split.dims, strict=True)
    ]
    yield from itertools.islice(itertools.product(*options), MAX_ASSIGNMENTS)


def call(case: DatabaseCase, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Call the operator without gradients."""
    with torch.no_grad():
        return case.call([item.clone() for item in tensors])


def is_right(case: DatabaseCase, whole: list[Tensor], dims: Sequence[int | None], lengths: Sequence[int]) -> bool:
    """Return whether pieces along `dims` give the whole results, and the whole gradients if the operator has any."""
    parts = [
        [take(item, dim, lengths, rank) for item, dim in zip(case.tensors, dims, strict=True)] for rank in range(RANKS)
    ]
    try:
        results = [call(case, part) for part in parts]
        joints = find_joints(whole, results, lengths)
        if joints is None:
            return False
        if not any(case.differentiable):
            return True
        return gradients_agree(case, parts, dims, joints, lengths)
    except Exception:
        return False  # the operator does not run on such pieces


def take(value: Tensor, dim: int | None, lengths: Sequence[int], rank: int) -> Tensor:
    """Return one rank's piece."""
    return value if dim is None else value.narrow(dim, sum(lengths[:rank]), lengths[rank])


def find_joints(
    whole: Sequence[Tensor], pieces: Sequence[Sequence[Tensor]], lengths: Sequence[int]
) -> list[Joint] | None:
    """Return how each result is joined, or None if one cannot be."""
    if any(len(part) != len(whole) for part in pieces):
        return None
    joints: list[Joint] = []
    for place, wanted in enumerate(whole):
        parts = [part[place] for part in pieces]
        dims = [dim for dim in range(wanted.dim()) if can_concatenate(wanted, parts, dim, lengths)]
        if dims:
            joints.append(dims[0])
        elif all(part.shape == wanted.shape for part in parts) and are_close(sum(parts[1:], parts[0]), wanted):
            joints.append(None)
        else:
            return None
    return joints


def can_concatenate(wanted: Tensor, parts: Sequence[Tensor], dim: int, lengths: Sequence[int]) -> bool:
    """Return whether the parts, one after the other along a dim, are the whole; their lengths may be in proportion."""
    shapes = [[size for place, size in enumerate(item.shape) if place != dim] for item in (wanted, *parts)]
    if any(part.dim() != wanted.dim() for part in parts) or any(shape != shapes[0] for shape in shapes):
        return False
    total, size = sum(lengths), wanted.shape[dim]
    if size == 0 or any(part.shape[dim] * total != length * size for part, length in zip(parts, lengths, strict=True)):
        return False
    return are_close(torch.cat(list(parts), dim), wanted)


def are_close(found: Tensor, wanted: Tensor) -> bool:
    """Return whether values agree to rounding."""
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return False
    return torch.allclose(found, wanted, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


def gradients_agree(
    case: DatabaseCase,
    parts: Sequence[Sequence[Tensor]],
    dims: Sequence[int | None],
    joints: Sequence[Joint],
    lengths: Sequence[int],
) -> bool:
    """Return whether gradients of pieces, concatenated where divided and added elsewhere, are those of the whole."""
    whole = compute_gradients(case, case.tensors, [(0, None)] * len(joints))
    pieces = []
    for rank, part in enumerate(parts):
        # An added result needs its whole cotangent on every rank, a concatenated one that rank's part.
        start = sum(lengths[:rank])
        pieces.append(
            compute_gradients(
                case, part, [(0, None) if joint is None else (start / sum(lengths), joint) for joint in joints]
            )
        )
    for place, dim in enumerate(dims):
        wanted = whole[place]
        found = [part[place] for part in pieces]
        if wanted is None or any(item is None for item in found):
            if wanted is not None or any(item is not None for item in found):
                return False
            continue
        tensors = [item for item in found if item is not None]
        joined = sum(tensors[1:], tensors[0]) if dim is None else torch.cat(tensors, dim)
        if not are_close(joined, wanted):
            return False
    return True


def compute_gradients(
    case: DatabaseCase, tensors: Sequence[Tensor], offsets: Sequence[tuple[float, int | None]]
) -> list[Tensor | None]:
    """Return the gradients of a sum of the results that weighs each element by its position in the whole.

    `offsets` has, for each result, where in the whole it begins along which dim, as a fraction of its size there.
    """
    inputs = [
        item.detach().clone().requires_grad_(flag) for item, flag in zip(tensors, case.differentiable, strict=True)
    ]
    results = case.call([item * 1 if item.requires_grad else item for item in inputs])
    total = torch.zeros((), dtype=torch.float64)
    for value, (fraction, dim) in zip(results, offsets, strict=True):
        if value.requires_grad:
            weight = position_weights(value, fraction, dim)
            real = torch.view_as_real(value.resolve_conj()).sum(-1) if value.is_complex() else value
            total = total + (real * weight).sum()
    wanted = [item for item in inputs if item.requires_grad]
    if not total.requires_grad:
        return [None] * len(inputs)
    grads = iter(torch.autograd.grad(total, wanted, allow_unused=True))
    return [next(grads) if item.requires_grad else None for item in inputs]


def position_weights(value: Tensor, fraction: float, dim: int | None) -> Tensor:
    """Return weights that depend on the position of each element in the whole tensor."""
    weight = torch.ones(value.shape, dtype=torch.float64)
    for place, size in enumerate(value.shape):
        start = 0
        if place == dim and fraction:
            # The whole size is the piece's start plus its length, as the last piece ends there.
            start = round(size * fraction / (1 - fraction))
        index = torch.arange(start, start + size, dtype=torch.float64)
        weight = weight * torch.cos(index * (place + 1) + 1).view(
            [-1 if other == place else 1 for other in range(value.dim())]
        )
    return weight

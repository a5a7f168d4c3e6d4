"""Move a value to another placement, with the transpose of the move for its gradient."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rankless.collectives.mesh_collectives import all_gather
from rankless.compiler.lowering.lower import move_locally
from rankless.compiler.sharding.redistribute import Redistribution, needs_whole
from rankless.logical_view.call_observers import OBSERVERS, send_move
from rankless.parallel.mesh import MeshAxis
from rankless.parallel.tensor_placement import Partial, Placement, Replicate, Shard


def find_gradient_placement(placement: Placement) -> Placement:
    """Return how the gradient of a value lies; see Note [placements of gradients]."""
    if isinstance(placement, Replicate):
        return Partial()
    return Replicate() if isinstance(placement, Partial) else placement


class EagerBuilder:
    """Runs what a graph builder would add to a program."""

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a function."""
        return target(*args, **kwargs)


def move(value: Tensor, axis: MeshAxis, shape: tuple[int, ...], before: Placement, after: Placement) -> Tensor:
    """Return a rank's part of a value in another placement, without a gradient.

    Args:
        value: The rank's part: rows, a term of a sum, or the whole value.
        axis: The ranks that hold the parts. The call is collective unless the new placement follows from the old.
        shape: The logical shape.
        before: The placement of `value`.
        after: The wanted placement. A sum is the only partial one.
    """
    if before == after:
        return value
    if value.is_sparse:
        return move_sparse(value, axis, after)
    if isinstance(before, Replicate) and isinstance(after, Shard):
        return value.narrow(after.dim, after.start(axis.rank), after.lengths[axis.rank])
    if isinstance(before, Shard) and isinstance(after, Partial):
        return put_among_zeros(value, shape, before.dim, before.start(axis.rank))
    if needs_whole(before, after):
        return move(move(value, axis, shape, before, Replicate()), axis, shape, Replicate(), after)
    builder: Any = EagerBuilder()
    moved: Any = move_locally(builder, value, axis, before, after, shape)  # type: ignore[arg-type]  # it runs
    if moved is None:
        target = Redistribution(axis, before, after)
        if OBSERVERS:
            send_move(value, target, shape)
        moved = target(value, *target.list_lengths(shape))
    found: Tensor = moved
    return found


def move_sparse(value: Tensor, axis: MeshAxis, after: Placement) -> Tensor:
    """Return a sparse sum over the ranks whole, or a whole sparse value as a term of a sum.

    A sum has the entries of all terms, those of one rank after those of the rank before, as rows lie.
    """
    if isinstance(after, Partial):
        return value if axis.rank == 0 else torch.zeros_like(value)
    assert isinstance(after, Replicate), after  # gradients of parameters alone are sparse
    count = torch.tensor([value._nnz()], device=value.device)
    counts = all_gather(count, among=axis, dim=0, lengths=[1] * axis.size).tolist()
    for part, dim in ((value._indices(), 1), (value._values(), 0)) if OBSERVERS else ():
        whole = (*part.shape[:dim], sum(counts), *part.shape[dim + 1 :])
        send_move(part, Redistribution(axis, Shard(dim, tuple(counts)), after), whole)
    places = all_gather(value._indices(), among=axis, dim=1, lengths=counts)
    entries = all_gather(value._values(), among=axis, dim=0, lengths=counts)
    return torch.sparse_coo_tensor(places, entries, value.shape, check_invariants=False)


def put_among_zeros(rows: Tensor, shape: Sequence[int], dim: int, start: int) -> Tensor:
    """Return the term of a sum over the ranks that a rank's rows are: zeros in the other rows of the logical shape.

    Args:
        rows: The rows.
        shape: The logical shape.
        dim: The dim that is divided.
        start: The number of the first of these rows. Programs for several sizes compute it.
    """
    whole = rows.new_zeros(tuple(shape))
    whole.narrow(dim, start, rows.shape[dim]).copy_(rows)
    return whole


class Move(torch.autograd.Function):
    """`move` with its transpose as gradient."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, axis: MeshAxis, shape: tuple[int, ...], before: Placement, after: Placement
    ) -> Tensor:
        """Move the value."""
        ctx.axis, ctx.shape, ctx.before, ctx.after = axis, shape, before, after
        # Without `.data` a view of the memory that was received could not be changed in place later.
        return move(value, axis, shape, before, after).data

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Move the gradient back, so that a gradient of the gradient moves too."""
        before, after = map(find_gradient_placement, (ctx.after, ctx.before))
        moved = move_with_gradient(gradient.contiguous(), ctx.axis, ctx.shape, before, after)
        return moved, None, None, None, None


def move_with_gradient(
    value: Tensor, axis: MeshAxis, shape: tuple[int, ...], before: Placement, after: Placement
) -> Tensor:
    """Return a rank's part of a value in another placement; its gradient moves back. See `move`."""
    if before == after:
        return value
    moved: Tensor = Move.apply(value, axis, shape, before, after)  # type: ignore[no-untyped-call]
    return moved

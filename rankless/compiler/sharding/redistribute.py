"""Redistribution of a value from one placement to another along one axis, and its cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Literal

import torch
from torch import fx

from rankless.collectives import mesh_collectives
from rankless.compiler.ir import local_kernels
from rankless.compiler.ir.local_kernels import join_blocks
from rankless.compiler.ir.operator_origin import ModuleName
from rankless.compiler.rules.pattern import is_partial_sum
from rankless.compiler.selected_rows.selections import is_reordered
from rankless.compiler.tracing.symbolic_sizes import size_hint
from rankless.parallel.mesh import MeshAxis
from rankless.parallel.tensor_placement import BlockedShard, OnRank, Partial, Placement, Replicate, Shard, Sharding

CollectivePurpose = Literal["input", "operator", "gradient", "output"]
"""What needs the result: an operator as its input or within its computation, the optimizer, or the job's caller."""


@dataclass(frozen=True, kw_only=True)
class CollectiveRecord:
    """A collective of a program, with the operator and the script line that need it.

    `bytes` is the size of the logical value. `sent_bytes` is what one worker sends in a ring.
    """

    kind: str
    """The function of `torch.distributed` that runs; "ring_shift" if each worker sends to the next along the axis."""
    purpose: CollectivePurpose
    value: str
    bytes: int
    sent_bytes: int
    line: str
    reason: str
    axis: str
    """The axis along which the value moves; several names for a sum along several."""
    module: ModuleName | None = None
    backward: bool = False
    gathered: bool = False
    """Whether every rank gets the whole of a value that was sharded."""
    in_full: bool = False
    """Whether every rank along the axis then computes the whole result of an operator."""
    overlapped: bool = False
    """Whether the collective overlaps with computation."""


def count_bytes(node: fx.Node, shape: Sequence[int] | None = None) -> int:
    """Return the size of a logical value, or of a piece of it with another shape."""
    value = node.meta["val"]
    elements = prod(size_hint(size) for size in (value.shape if shape is None else shape))
    return int(elements * value.element_size())


def estimate_cost(size: int, source: Placement, target: Placement, ranks: int) -> float:
    """Estimate the bytes that a redistribution sends; infinite if the redistribution is impossible."""
    if source == target:
        return 0
    match source, target:
        case Replicate(), Shard() | BlockedShard() | OnRank() | Replicate():
            return 0
        case Replicate() | OnRank(), Partial():
            return 0 if is_partial_sum(target) else inf
        case (Shard(), OnRank()) | (OnRank(), Shard()):
            return size / ranks
        case (OnRank(), _) | (BlockedShard(), OnRank()):
            return size
        case Shard() | BlockedShard(), Replicate() | BlockedShard():
            return size
        case BlockedShard(), Shard():
            return size
        case Shard(), Shard():
            return size / ranks if source.dim != target.dim else size
        case Partial(), Replicate() | BlockedShard():
            return 2 * size
        case Partial(), Shard() | OnRank():
            return size if is_partial_sum(source) else 2 * size
    return inf


def estimate_costs(size: int, source: Sharding, target: Sharding, axes: Sequence[MeshAxis]) -> float:
    """Estimate the bytes that the redistribution of a value of `size` bytes along all axes sends."""
    triples = zip(axes, source, target, strict=True)
    return sum(estimate_cost(size, before, after, axis.size) for axis, before, after in triples)


def all_reduce_bytes(size: int, ranks: int) -> int:
    """Return what one worker sends to sum a value in a ring: every part goes round twice, except for one hop."""
    return 2 * size * (ranks - 1) // ranks


class Redistribution:
    """A redistribution along one axis, as a node of a local program: called with a tensor and its shard lengths."""

    def __init__(self, axis: MeshAxis, source: Placement, target: Placement) -> None:
        self.axis = axis
        self.source = source
        self.target = target
        self.__name__ = self.kind

    @property
    def kind(self) -> str:
        """The collective that runs."""
        match self.source, self.target:
            case OnRank(), Shard():
                return "scatter"
            case OnRank(), _:
                return "broadcast"
            case Shard(), OnRank():
                return "gather"
            case _, OnRank():
                return "reduce"
            case Shard(), Shard():
                return "all_to_all"
            case Shard() | BlockedShard(), _:
                return "all_gather"
            case _, Shard():
                return "reduce_scatter"
        return "all_reduce" if is_partial_sum(self.source) else "all_gather"

    @property
    def is_gather(self) -> bool:
        """Whether every rank gets the whole of a value that was sharded."""
        return isinstance(self.source, Shard | BlockedShard) and not isinstance(self.target, Shard | OnRank)

    def list_lengths(self, shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return the shard lengths before and after, where the value is sharded; they may vary from call to call.

        For a value that one rank has, its shape comes first: the others do not know it.

        Args:
            shape: The shape of the value that the ranks along the axis have together.
        """
        if isinstance(self.source, OnRank):
            return (tuple(shape), *([self.target.lengths] if isinstance(self.target, Shard) else []))
        if isinstance(self.source, BlockedShard):
            return (self.source.count_rows(shape[self.source.dim]),)
        return tuple(item.lengths for item in (self.source, self.target) if isinstance(item, Shard))

    def sent_bytes(self, size: int) -> int:
        """Return what one worker sends for a logical value of `size` bytes.

        An all-gather and a reduce-scatter pad pieces to the longest.
        """
        source, target, ranks = self.source, self.target, self.axis.size
        if isinstance(source, OnRank):
            return size * (ranks - 1) // ranks if isinstance(target, Shard) else size
        if isinstance(target, OnRank):
            return size // ranks if isinstance(source, Shard) else size
        if isinstance(source, Shard) and isinstance(target, Shard):
            return size * (ranks - 1) // ranks**2
        divided = source if isinstance(source, Shard | BlockedShard) else target
        if isinstance(divided, Shard | BlockedShard):
            lengths = [int(size_hint(length)) for length in divided.lengths]
            return size * max(lengths) * (ranks - 1) // max(1, sum(lengths))
        return all_reduce_bytes(size, ranks) if is_partial_sum(source) else size * (ranks - 1)

    def __call__(self, value: torch.Tensor, *lengths: tuple[int, ...]) -> torch.Tensor:
        """Redistribute this rank's piece; `lengths` are those of `list_lengths` in the present call."""
        source, target = self.source, self.target
        if isinstance(source, OnRank):
            return send_from_one(value, self.axis, source.rank, target, *lengths)
        if isinstance(target, OnRank):
            return bring_to_one(value, self.axis, source, target.rank, *lengths)
        if isinstance(source, Shard) and isinstance(target, Shard):
            return mesh_collectives.all_to_all(
                value,
                among=self.axis,
                from_dim=source.dim,
                from_lengths=lengths[0],
                to_dim=target.dim,
                to_lengths=lengths[1],
            )
        if isinstance(source, BlockedShard):
            gathered = mesh_collectives.all_gather(value, among=self.axis, dim=source.dim, lengths=lengths[0])
            return join_blocks(gathered, source.dim, source.lengths)
        if isinstance(source, Shard):
            return mesh_collectives.all_gather(value, among=self.axis, dim=source.dim, lengths=lengths[0])
        if isinstance(target, Shard):
            return mesh_collectives.reduce_scatter(value, among=self.axis, dim=target.dim, lengths=lengths[0])
        if isinstance(source, Partial) and not is_partial_sum(source):
            gathered = mesh_collectives.all_gather(
                value.unsqueeze(0), among=self.axis, dim=0, lengths=(1,) * self.axis.size
            )
            return local_kernels.reduce_extremum(gathered, source.reduce_op)
        return mesh_collectives.all_reduce(value, among=self.axis)


def send_from_one(
    value: torch.Tensor,
    axis: MeshAxis,
    rank: int,
    target: Placement,
    shape: tuple[int, ...],
    lengths: tuple[int, ...] = (),
) -> torch.Tensor:
    """Return this rank's piece, or the whole, of a value that one rank along an axis has.

    Args:
        value: The value on that rank; elsewhere a tensor of its dtype and device.
        axis: The axis.
        rank: The rank that has the value.
        target: How the value is to lie along the axis.
        shape: The shape of the value.
        lengths: The lengths of the pieces, if it is to be divided.
    """
    if isinstance(target, Shard):
        return mesh_collectives.scatter_from(
            value, among=axis, dim=target.dim, lengths=lengths, source=rank, shape=shape
        )
    whole = value.contiguous() if axis.rank == rank else value.new_empty(shape)
    mesh_collectives.broadcast(whole, among=axis, source=rank)
    return whole


def bring_to_one(
    value: torch.Tensor, axis: MeshAxis, source: Placement, rank: int, lengths: tuple[int, ...] = ()
) -> torch.Tensor:
    """Return a value on one rank along an axis, and a tensor without rows on the others.

    Args:
        value: This rank's piece of the value, or its term of it.
        axis: The axis.
        source: How the value lies along the axis.
        rank: The rank that is to have the value.
        lengths: The lengths of the pieces, if it is divided.
    """
    if isinstance(source, Shard):
        (whole,) = mesh_collectives.gather_to([value], among=axis, dims=[source.dim], lengths=[lengths], targets=[rank])
        return whole
    return mesh_collectives.reduce_to(value, among=axis, target=rank)


class StackingAllGather:
    """An all-gather of equal pieces along a new dim 0, as a node of a local program."""

    def __init__(self, axis: MeshAxis) -> None:
        self.axis = axis
        self.__name__ = "all_gather"

    def sent_bytes(self, size: int) -> int:
        """Return what one worker sends for `size` bytes of all ranks together."""
        return size * (self.axis.size - 1) // self.axis.size

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        """Gather the pieces of all ranks."""
        return mesh_collectives.all_gather(value.unsqueeze(0), among=self.axis, dim=0, lengths=(1,) * self.axis.size)


class RingShift:
    """The pieces of a value passed to the next worker along an axis, as a node of a local program.

    Args:
        axis: The axis.
        placement: How the value is divided before it is passed on.
    """

    def __init__(self, axis: MeshAxis, placement: Shard) -> None:
        self.axis = axis
        self.placement = placement
        self.__name__ = "ring_shift"

    def sent_bytes(self, size: int) -> int:
        """Return what a worker sends for a value of `size` bytes in all, if its piece is the longest."""
        lengths = [int(size_hint(length)) for length in self.placement.lengths]
        return size * max(lengths) // max(1, sum(lengths))

    def __call__(self, value: torch.Tensor, lengths: tuple[int, ...]) -> mesh_collectives.PendingShift:
        """Begin to pass this rank's piece on; `lengths` are those of the placement in the present call."""
        return mesh_collectives.start_ring_shift(value, among=self.axis, dim=self.placement.dim, lengths=lengths)


class JointGather:
    """Several divided values, each brought to one rank along an axis, as a node of a local program.

    Args:
        axis: The axis.
        dims: The dim of each value that the axis divides.
        ranks: The rank that gets each value.
    """

    def __init__(self, axis: MeshAxis, dims: Sequence[int], ranks: Sequence[int]) -> None:
        self.axis = axis
        self.dims = tuple(dims)
        self.ranks = tuple(ranks)
        self.__name__ = "all_to_all"

    def sent_bytes(self, size: int) -> int:
        """Return what one worker sends for values of `size` bytes in all."""
        return size // self.axis.size

    def __call__(self, values: Sequence[torch.Tensor], *lengths: tuple[int, ...]) -> list[torch.Tensor]:
        """Return the values that this rank gets, and tensors without rows for the others.

        Args:
            values: This rank's piece of each.
            lengths: The lengths of the pieces of each in the present call.
        """
        return mesh_collectives.gather_to(values, among=self.axis, dims=self.dims, lengths=lengths, targets=self.ranks)


Collective = Redistribution | StackingAllGather | RingShift | JointGather
"""What moves values between the workers along an axis."""


def list_steps(source: Sharding, target: Sharding) -> list[Sharding]:
    """Return the shardings from one to another, each of which differs from the one before it along one axis.

    Where an axis divides a dim, the lengths of the axes after it on this dim hold for its pieces only. So these are
    made whole before it changes, and divided again afterwards.
    """
    changed = {number for number, pair in enumerate(zip(source, target, strict=True)) if pair[0] != pair[1]}
    dims = {
        number: {item.dim for item in (source[number], target[number]) if isinstance(item, Shard | BlockedShard)}
        for number in changed
    }
    nested = {
        number
        for number, placement in enumerate(source)
        if isinstance(placement, Shard | BlockedShard)
        and any(placement.dim in dims[outer] for outer in changed if outer < number)
    }
    steps, current = [], source
    for number in reversed(range(len(source))):
        pair = source[number], target[number]
        if number in nested or (number in changed and needs_whole(*pair)):
            current = replace_placement(current, number, Replicate())
            steps.append(current)
    for number in range(len(source)):
        if current[number] != target[number]:
            current = replace_placement(current, number, target[number])
            steps.append(current)
    return steps


def needs_whole(source: Placement, target: Placement) -> bool:
    """Return whether no single collective leads from one placement to the other."""
    if is_reordered([source, target]):
        return not (isinstance(source, Replicate) or isinstance(target, Replicate))
    if isinstance(source, BlockedShard) or isinstance(target, BlockedShard):
        return not (isinstance(source, Replicate) or isinstance(target, Replicate))
    if not isinstance(target, Shard | OnRank):
        return False
    is_resize = isinstance(source, Shard) and isinstance(target, Shard) and source.dim == target.dim
    moves = isinstance(source, OnRank) and isinstance(target, OnRank)
    return is_resize or moves or (isinstance(source, Partial) and source.reduce_op != "sum")


def replace_placement(sharding: Sharding, number: int, placement: Placement) -> Sharding:
    """Return a sharding with another placement along one axis."""
    return (*sharding[:number], placement, *sharding[number + 1 :])

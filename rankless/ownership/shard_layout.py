"""The shards of tensors that are divided between workers, and groups of them that one collective moves.

Note [flat shards]: a shard is sent as its elements in the order in which they lie in memory. A group has a flat tensor
with one chunk per worker. A chunk is the worker's shards of all tensors of the group, one after the other. All chunks
are as long as the longest, because backends take equal chunks only.

Note [copies of shards]: where a worker may be lost that has rows of a tensor, another worker has the same rows. It gets
the same gradients and makes the same steps, so that it can take its place, and nothing is sent after a step. All that
counts each shard once, such as a norm or a file, leaves copies out. Along the axis `data`, `WholeValues.copy_holders`
has for each worker the one with copies of its shards. Beside heterogeneous workers, a layout names those with copies.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from rankless.collectives.mesh_collectives import send_along, start_all_gather
from rankless.parallel.mesh import MeshAxis, WorkerGroup
from rankless.parallel.tensor_placement import BlockedShard, Shard, compute_local_shape, split_lengths
from rankless.records.parallel_plan import StateDivision

Item = TypeVar("Item")
GATHER_BYTES = 25 * 2**20
"""The size of whole tensors that are gathered together."""


@dataclass(frozen=True)
class ShardLayout:
    """How a dense tensor is divided between the workers along an axis."""

    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    order: tuple[int, ...]
    """Its dims from the slowest to the fastest in memory."""
    placement: Shard | BlockedShard
    """The dim that is divided, and each worker's length."""
    copies: tuple[int, ...] = ()
    """The workers with the same rows as the one that has all of them; see Note [copies of shards]."""

    @staticmethod
    def of(tensor: Tensor, placement: Shard | BlockedShard, copies: tuple[int, ...] = ()) -> "ShardLayout":
        """Return the layout of a dense tensor whose dims may lie in memory in any order."""
        return ShardLayout(tuple(tensor.shape), order_dims(tensor.stride()), placement, copies)

    @property
    def holders(self) -> tuple[int, ...]:
        """The workers that have rows: first those that count, then copies."""
        return (*(rank for rank, length in enumerate(self.placement.lengths) if length), *self.copies)

    def find_original(self, rank: int) -> int:
        """Return the worker whose shard a worker has: another one's for a copy."""
        return self.holders[0] if rank in self.copies else rank

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of one worker's shard."""
        return tuple(compute_local_shape(self.shape, (self.placement,), (self.find_original(rank),)))

    def shard_strides(self, rank: int) -> tuple[int, ...]:
        """Return the strides of one worker's shard in memory of its own."""
        return self._dense_strides(self.shard_shape(rank))

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of the whole tensor."""
        return self._dense_strides(self.shape)

    def shard_size(self, rank: int) -> int:
        """Return the number of elements of one worker's shard."""
        return prod(self.shard_shape(rank))

    def get_shard(self, whole: Tensor, rank: int) -> Tensor:
        """Return one worker's shard of a whole tensor: as a view, unless it consists of rows of several blocks."""
        view = self.view_range(whole, rank)
        return view if isinstance(self.placement, Shard) else view.flatten(self.placement.dim, self.placement.dim + 1)

    def view_range(self, whole: Tensor, rank: int) -> Tensor:
        """Return one worker's shard of a whole tensor as a view, in the shape of `view_shard`."""
        placement, rank = self.placement, self.find_original(rank)
        dim, start, length = placement.dim, placement.start(rank), placement.lengths[rank]
        if isinstance(placement, Shard):
            return whole.narrow(dim, start, length)
        apart: Tensor = whole.unflatten(dim, (-1, placement.block))
        return apart.narrow(dim + 1, start, length)

    def view_shard(self, shard: Tensor, rank: int) -> Tensor:
        """Return a shard as a view in which blocks have a dim of their own, before the divided one."""
        placement = self.placement
        if isinstance(placement, Shard):
            return shard
        blocks = self.shape[placement.dim] // placement.block
        apart: Tensor = shard.unflatten(placement.dim, (blocks, placement.lengths[rank]))
        return apart

    def list_ranges(self, rank: int) -> list[tuple[int, int]]:
        """Return the rows of the whole tensor that one worker's shard has, as ranges from a row up to another."""
        placement, rank = self.placement, self.find_original(rank)
        start, length = placement.start(rank), placement.lengths[rank]
        if isinstance(placement, Shard):
            return [(start, start + length)]
        firsts = range(start, self.shape[placement.dim], placement.block)
        return [(first, first + length) for first in firsts]

    def copy_shard(self, whole: Tensor, rank: int) -> Tensor:
        """Return one worker's shard in memory of its own, in the order of the whole tensor's dims."""
        shard = whole.new_empty_strided(self.shard_shape(rank), self.shard_strides(rank))
        return shard.copy_(self.get_shard(whole, rank))

    def is_contiguous_shard(self) -> bool:
        """Return whether each worker's shard is one range of the whole tensor's memory."""
        outer = self.order[: self.order.index(self.placement.dim)]
        return isinstance(self.placement, Shard) and all(self.shape[dim] == 1 for dim in outer)

    def view_flat(self, flat: Tensor, shape: Sequence[int]) -> Tensor:
        """Return elements in memory order as a tensor of this shape, which is the whole's or a shard's."""
        return flat.as_strided(tuple(shape), self._dense_strides(shape), flat.storage_offset())

    def flatten(self, value: Tensor) -> Tensor:
        """Return the elements of a whole tensor or a shard in memory order; without a copy if it lies so already."""
        return value.permute(self.order).reshape(-1)

    def _dense_strides(self, shape: Sequence[int]) -> tuple[int, ...]:
        return make_dense_strides(shape, self.order)


@dataclass(frozen=True)
class ShardGroup:
    """Tensors of one dtype and device whose shards one collective moves; see Note [flat shards]."""

    layouts: tuple[ShardLayout, ...]
    ranks: int

    @cached_property
    def chunk_size(self) -> int:
        """The number of elements of a worker's chunk."""
        return max(sum(layout.shard_size(rank) for layout in self.layouts) for rank in range(self.ranks))

    @property
    def flat_size(self) -> int:
        """The number of elements of all chunks."""
        return self.ranks * self.chunk_size

    @cached_property
    def is_one_memory(self) -> bool:
        """Whether the flat tensor lies in memory exactly as the only tensor of the group."""
        (first, *others) = self.layouts
        return not others and first.is_contiguous_shard() and len(set(first.placement.lengths)) == 1

    def join_shards(self, shards: Sequence[Tensor]) -> Tensor:
        """Return a worker's chunk with its shards."""
        if self.is_one_memory:
            return self.layouts[0].flatten(shards[0])
        parts = [layout.flatten(shard) for layout, shard in zip(self.layouts, shards, strict=True)]
        missing = self.chunk_size - sum(part.numel() for part in parts)
        return torch.cat([*parts, parts[0].new_zeros(missing)] if missing else parts)

    def view_shards(self, chunk: Tensor, rank: int) -> list[Tensor]:
        """Return a worker's shards as views of its chunk."""
        views, start = [], 0
        for layout in self.layouts:
            size = layout.shard_size(rank)
            views.append(layout.view_flat(chunk[start : start + size], layout.shard_shape(rank)))
            start += size
        return views

    def view_all_shards(self, flat: Tensor) -> list[list[Tensor]]:
        """Return the shards of each worker as views of the flat tensor."""
        chunks = flat.view(self.ranks, self.chunk_size)
        return [self.view_shards(chunk, rank) for rank, chunk in enumerate(chunks)]

    def join_wholes(self, wholes: Sequence[Tensor], flat: Tensor) -> None:
        """Copy whole tensors into the flat tensor."""
        if self.is_one_memory:
            self.layouts[0].view_flat(flat, self.layouts[0].shape).copy_(wholes[0])
            return
        targets = self.view_all_shards(flat)
        for rank, shards in enumerate(targets):
            sources = [layout.get_shard(whole, rank) for layout, whole in zip(self.layouts, wholes, strict=True)]
            torch._foreach_copy_(shards, sources)

    def split_wholes(self, flat: Tensor) -> list[Tensor]:
        """Return the whole tensors from the flat tensor, as views of it if it lies so already."""
        if self.is_one_memory:
            return [self.layouts[0].view_flat(flat, self.layouts[0].shape)]
        wholes = [flat.new_empty_strided(layout.shape, layout.strides) for layout in self.layouts]
        self.copy_to_wholes(flat, wholes)
        return wholes

    def copy_to_wholes(self, flat: Tensor, wholes: Sequence[Tensor]) -> None:
        """Copy the flat tensor into whole tensors."""
        for rank, shards in enumerate(self.view_all_shards(flat)):
            targets = [layout.view_range(whole, rank) for layout, whole in zip(self.layouts, wholes, strict=True)]
            sources = [layout.view_shard(shard, rank) for layout, shard in zip(self.layouts, shards, strict=True)]
            torch._foreach_copy_(targets, sources)


def gather_shards(layouts: Sequence[ShardLayout], shards: Sequence[Tensor], *, among: WorkerGroup) -> list[Tensor]:
    """Return whole tensors from the shards of all workers, of which this one has `shards`. Collective."""
    wholes = []
    for members in group_in_order(
        zip(layouts, shards, strict=True),
        kind=lambda item: (item[1].dtype, item[1].device),
        size=lambda item: prod(item[0].shape) * item[1].element_size(),
        limit=lambda _item, _groups: GATHER_BYTES,
    ):
        group = ShardGroup(tuple(layout for layout, _ in members), among.size)
        chunk = group.join_shards([shard for _, shard in members])
        flat = chunk.new_empty(group.flat_size)
        work = start_all_gather(flat, chunk, among=among)
        if work is not None:
            work.wait()
        wholes += group.split_wholes(flat)
    return wholes


def choose_copy_holders(hosts: Sequence[int]) -> tuple[int, ...]:
    """Return for each worker the one that has copies of its shards, on another host if there is one.

    Args:
        hosts: The host of each worker, by its rank.

    Example:
        >>> choose_copy_holders([0, 0, 1, 1])
        (2, 3, 0, 1)
        >>> choose_copy_holders([0, 0, 0])
        (1, 2, 0)
        >>> choose_copy_holders([0])
        ()
    """
    chosen: list[int] = []
    for worker, host in enumerate(hosts if len(hosts) > 1 else ()):
        others = [other for other in range(len(hosts)) if other != worker]
        elsewhere = [other for other in others if hosts[other] != host]
        # The next one of those with the fewest copies.
        chosen.append(min(elsewhere or others, key=lambda each: (chosen.count(each), (each - worker) % len(hosts))))
    return tuple(chosen)


def send_to_copies(
    layouts: Sequence[ShardLayout], shards: Sequence[Tensor], copy_holders: Sequence[int], among: WorkerGroup
) -> list[dict[int, Tensor]]:
    """Return for each tensor the shards of the workers of whose this one has copies. Collective if there are any.

    Args:
        layouts: How each tensor is divided.
        shards: This worker's shard of each.
        copy_holders: For each worker the one with copies of its shards.
        among: The workers.
    """
    received: list[dict[int, Tensor]] = []
    for members in group_in_order(
        zip(layouts, shards, strict=True),
        kind=lambda item: (item[1].dtype, item[1].device),
        size=lambda item: prod(item[0].shape) * item[1].element_size(),
        limit=lambda _item, _groups: GATHER_BYTES,
    ):
        found: list[dict[int, Tensor]] = [{} for _ in members]
        counts = [sum(layout.shard_size(worker) for layout, _ in members) for worker in range(among.size)]
        sent = torch.cat([layout.flatten(shard) for layout, shard in members])
        for worker, flat in send_along(sent, copy_holders, counts, among=among).items():
            parts = flat.split([layout.shard_size(worker) for layout, _ in members])
            for shown, (layout, _), part in zip(found, members, parts, strict=True):
                shown[worker] = layout.view_flat(part, layout.shard_shape(worker))
        received += found
    return received


def fit_placement(placement: Shard | BlockedShard, rows: int) -> Shard | BlockedShard:
    """Return a placement for what other axes leave of a dim: all on the rank that has all rows, else divided evenly.

    Args:
        placement: How an axis divides the whole dim.
        rows: The rows that are left.
    """
    if isinstance(placement, BlockedShard) or sum(placement.lengths) == rows:
        return placement
    owners = [rank for rank, length in enumerate(placement.lengths) if length]
    if len(owners) == 1:
        return Shard(placement.dim, tuple(rows if rank == owners[0] else 0 for rank in range(len(placement.lengths))))
    return Shard(placement.dim, split_lengths(rows, len(placement.lengths)))


def select_ranges(outer: Sequence[tuple[int, int]], inner: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return those rows of ranges that other ranges, which count the rows of the first ones, select."""
    found, first = [], 0
    for start, stop in outer:
        for low, high in inner:
            begin, end = max(low, first), min(high, first + stop - start)
            if begin < end:
                found.append((start + begin - first, start + end - first))
        first += stop - start
    return found


def order_dims(strides: Sequence[int]) -> tuple[int, ...]:
    """Return the dims of a dense tensor from the slowest to the fastest in memory."""
    return tuple(sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim)))


def make_dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor whose dims lie in memory in this order, from the slowest to the fastest."""
    strides, step = [1] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(1, shape[dim])
    return tuple(strides)


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether a tensor's elements fill a range of memory, each place once."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def group_in_order(
    items: Iterable[Item],
    *,
    kind: Callable[[Item], Hashable],
    size: Callable[[Item], int],
    limit: Callable[[Item, int], int],
) -> list[list[Item]]:
    """Group items of one kind that follow each other, up to a size. A larger item has a group of its own.

    Args:
        items: The items.
        kind: Returns what the items of a group have in common.
        size: Returns the size of an item.
        limit: Returns the largest size of a group, from an item and the number of groups so far.
    """
    groups: list[list[Item]] = []
    current, filled = None, 0
    for item in items:
        if not groups or kind(item) != current or filled + size(item) > limit(item, len(groups)):
            groups.append([])
            current, filled = kind(item), 0
        groups[-1].append(item)
        filled += size(item)
    return groups


def divide_evenly(shape: Sequence[int], order: Sequence[int], ranks: int) -> tuple[int, tuple[int, ...]] | None:
    """Return the dim along which a tensor is divided, and each worker's length; None if it is too small.

    It is the outermost dim in memory whose longest shard is at most 5 % longer than an even one, so that shards are
    ranges of memory; if there is none, the dim with the shortest longest shard.

    Args:
        shape: The sizes of the dims.
        order: The dims from the slowest to the fastest in memory.
        ranks: The number of workers.
    """
    candidates = [dim for dim in order if shape[dim] >= ranks]
    if not candidates:
        return None
    excess = {dim: -(-shape[dim] // ranks) * ranks / shape[dim] for dim in candidates}
    dim = next((dim for dim in candidates if excess[dim] <= EVEN), min(candidates, key=excess.__getitem__))
    return dim, tuple((shape[dim] + ranks - 1 - rank) // ranks for rank in range(ranks))


EVEN = 1.05
"""How much longer than an even shard the longest shard of a dim may be that is taken without looking at the others."""


def divide(parameter: Tensor, axis: MeshAxis, before: Sequence[StateDivision]) -> StateDivision | None:
    """Return the division of a parameter; None for one that is too small, or that leaves gaps in its memory.

    Args:
        parameter: The parameter.
        axis: The workers.
        before: How other axes divide it first. Of what they leave, each worker gets rows.
    """
    shape, strides = list(parameter.shape), parameter.stride()
    if axis.size == 1 or not is_dense(shape, strides):
        return None
    whole = list(shape)
    for division in before:
        own = [length for length in division.lengths if length]
        if len(own) > 1:
            shape[division.dim] = division.blocks * min(own)
    found = divide_evenly(shape, order_dims(strides), axis.size)
    if found is None:
        return None
    return StateDivision(axis=axis.name, dim=found[0], lengths=split_lengths(whole[found[0]], axis.size))


def give_to(parameter: Tensor, axis: MeshAxis, owner: int) -> StateDivision | None:
    """Return the division that gives a parameter to one worker; None for one without rows."""
    if parameter.dim() == 0 or parameter.shape[0] == 0 or not is_dense(tuple(parameter.shape), parameter.stride()):
        return None
    lengths = tuple(parameter.shape[0] if worker == owner else 0 for worker in range(axis.size))
    return StateDivision(axis=axis.name, dim=0, lengths=lengths)


def assign(parameter: Tensor, axis: MeshAxis, loads: list[int]) -> StateDivision | None:
    """Return the division that gives a parameter to the worker with the fewest bytes; None for one without rows.

    Args:
        parameter: The parameter.
        axis: The workers.
        loads: The bytes of each worker, to which the parameter's are added.
    """
    if axis.size == 1 or parameter.dim() == 0 or not is_dense(tuple(parameter.shape), parameter.stride()):
        return None
    rank = loads.index(min(loads))
    loads[rank] += parameter.numel() * parameter.element_size()
    lengths = [0] * axis.size
    lengths[rank] = parameter.shape[0]
    return StateDivision(axis=axis.name, dim=0, lengths=tuple(lengths))

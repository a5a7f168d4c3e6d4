"""all_reduce of several tensors as if they were one, straight between them and the slots of a group.

Note [pieces]: a piece of all values, from one tensor or several, is copied into the slot of each rank. Between two
ranks, and for few values, each rank then reduces all of it, straight into its outputs. Otherwise each reduces its share
in its slot, and copies the others' shares out. See notes [one shot] and [two shots] in `shared_reductions`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankless.collectives.backends.double_buffered_slots import HALF_BYTES, Slots, split_shares
from rankless.collectives.backends.operation_signature import Collective, encode_signature

WHOLE_BYTES = 512 << 10
"""The most bytes that ranks always reduce in one shot, all ranks' values together."""
LONG_BYTES = 32 << 10
"""Parts of so many bytes, on average, are reduced one by one. Shorter ones are reduced together, and then copied."""


class FusedCall(NamedTuple):
    """An all_reduce of several tensors. All are flat and contiguous, and have one dtype."""

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    """As long as the inputs. An output may be its input."""
    reduction: Any
    """A `Reduction`; a `HostReduction` on several hosts."""
    before: Callable[[Tensor], object]
    """Changes copies of this rank's values, in place, before they are reduced."""
    after: Callable[[Tensor], object]
    """Changes reduced values in place. It treats each value alike, because a rank may have some of them only."""


class FusedReductions:
    """The all_reduce of several tensors, for one group.

    Args:
        slots: The memory of the group.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._scratch: Tensor | None = None

    def all_reduce(self, call: FusedCall) -> None:
        """Reduce the inputs over all ranks into the outputs. See note [pieces].

        Raises:
            CollectiveError: Another rank ends, aborts, is late or makes another call. The group cannot be used again.
        """
        slots, signals, rank = self._slots, self._slots.signals, self._slots.rank
        count, dtype = sum(map(len, call.inputs)), call.inputs[0].dtype
        signature = encode_signature(
            Collective.FUSED_ALL_REDUCE, count=count, dtype=dtype, reduction=call.reduction.number
        )
        most = HALF_BYTES // dtype.itemsize
        reduces_all = slots.size <= 2 or count * dtype.itemsize * slots.size <= WHOLE_BYTES
        is_first = True
        for sources, targets in zip(cut_pieces(call.inputs, most), cut_pieces(call.outputs, most), strict=True):
            half = slots.begin_round((signature,) if is_first else ())
            views = slots.cut(half, dtype, sum(map(len, sources)))
            copy_each(sources, split_as(views[rank], sources))
            call.before(views[rank])
            signals.wait_for_all(signals.post())
            if is_first:
                for peer in range(slots.size):
                    slots.require_signature(half, signature, peer)
            is_first = False
            if reduces_all:
                self._reduce_all(call, views, targets)
            else:
                self._reduce_shares(call, views, targets)

    def _reduce_all(self, call: FusedCall, views: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        if len(targets) == 1 or views[0].nbytes >= LONG_BYTES * len(targets):
            for target, *parts in zip(targets, *(split_as(view, targets) for view in views), strict=True):
                call.reduction.reduce(parts, target)
                call.after(target)
            return
        if self._scratch is None:
            with torch.inference_mode(False):
                self._scratch = torch.empty(HALF_BYTES, dtype=torch.uint8, device="cpu")
        total = self._scratch[: views[0].nbytes].view(views[0].dtype)
        call.reduction.reduce(views, total)
        call.after(total)
        copy_each(split_as(total, targets), targets)

    def _reduce_shares(self, call: FusedCall, views: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        signals, rank, size = self._slots.signals, self._slots.rank, self._slots.size
        shares = split_shares(len(views[0]), size)
        first, last = shares[rank]
        if first < last:
            own = views[rank][first:last]
            call.reduction.reduce([view[first:last] for view in views], own)
            call.after(own)
        phase = signals.post()
        for owner in [*range(rank, size), *range(rank)]:
            signals.wait_for(owner, phase)
            first, last = shares[owner]
            found = list(find_range(targets, first, last))
            copy_each(split_as(views[owner][first:last], found), found)


def cut_pieces(tensors: Sequence[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Yield the values of flat tensors in pieces of `most` values. The last one may have fewer."""
    piece: list[Tensor] = []
    room = most
    for tensor in tensors:
        start = 0
        while start < len(tensor):
            piece.append(tensor if not start and len(tensor) <= room else tensor[start : start + room])
            start += len(piece[-1])
            room -= len(piece[-1])
            if not room:
                yield piece
                piece, room = [], most
    if piece:
        yield piece


def find_range(tensors: Sequence[Tensor], first: int, last: int) -> Iterator[Tensor]:
    """Yield the parts of flat tensors that hold the values from `first` to `last`, counted through all of them."""
    offset = 0
    for tensor in tensors:
        start, end = max(first - offset, 0), min(last - offset, len(tensor))
        if start < end:
            yield tensor[start:end]
        offset += len(tensor)


def split_as(values: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return flat values in parts that are as long as the tensors."""
    return [values] if len(tensors) == 1 else list(values.split(list(map(len, tensors))))


def copy_each(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy each source to its target."""
    if len(sources) == 1:
        targets[0].copy_(sources[0])
    elif sources:
        torch._foreach_copy_(list(targets), list(sources))

"""all_reduce, reduce and reduce_scatter of flat tensors in the slots of a group.

Note [two shots]: every rank copies a piece of its values into its slot. When all have done so, each rank reduces its
share of the piece over all slots, in rank order, and writes the result into its own slot. When all have done so, each
rank copies all shares out. A rank's own share is read from its tensor, so only the other shares are copied in.

Note [one shot]: for few values, and between two ranks, each rank reduces all of them: one wait instead of two.

Note [shared tensors]: a tensor that a group has allocated is in its memory already. Each rank reduces its share from
all ranks' tensors into its own tensor, and copies the result into the others', piece by piece, while it is in the
cache. No other rank touches its share, so the ranks wait only at the beginning and at the end. A reduce_scatter reads
its share from all ranks' tensors, and changes none. If one rank passes such a tensor and another does not, all notice
at the first wait, and make the call without it.
"""

from typing import Any

import torch

from rankless.collectives.backends.operation_signature import Collective, encode_signature
from rankless.collectives.backends.reductions import Reduction
from rankless.collectives.backends.shared_tensors import SharedTensor, SharedTensors
from rankless.collectives.backends.slots import HALF_BYTES, Slots, split_rounds, split_shares
from rankless.collectives.backends.small_reductions import SmallReduction

ONE_SHOT_BYTES = 64 << 10
"""The most bytes that ranks always reduce in one shot, all ranks' values together."""
SHARED_PIECE_BYTES = 512 << 10
"""So much of shared tensors, of all ranks together, is reduced and copied at a time."""
_MOST_SMALL = 256
"""So many lengths of small tensors are remembered."""


class SharedReductions:
    """The reductions of one group.

    All tensors are flat and contiguous. All methods raise `CollectiveError` if another rank ends, aborts, is late or
    makes another call; the group cannot be used afterwards.

    Args:
        slots: The memory of the group.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self.rank, self.size = slots.rank, slots.size
        self._reductions: dict[tuple[Any, torch.dtype], Reduction] = {}
        self.tensors = SharedTensors(slots.rank, slots.size)
        self._small: dict[tuple[int, torch.dtype, int], SmallReduction] = {}

    def get_reduction(self, operation: Any, dtype: torch.dtype) -> Reduction:
        """Return the reduction for a `ReduceOp` and a dtype. Raises `ConfigError` if there is none."""
        key = (getattr(operation, "op", operation), dtype)
        if key not in self._reductions:
            self._reductions[key] = Reduction(operation, dtype)
        return self._reductions[key]

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction) -> None:
        """Replace the values by their reduction over all ranks."""
        size = self._slots.size
        if size == 1:
            return
        if tensor.nbytes * size <= ONE_SHOT_BYTES and len(tensor):
            self._get_small(tensor, reduction).run(tensor)
            return
        shared = self.tensors.find(tensor) if len(tensor) else None
        if shared is not None and self._all_reduce_shared(tensor, shared, reduction):
            return
        if size == 2:
            self._one_shot(_sign(Collective.ALL_REDUCE, len(tensor), reduction, tensor.dtype), tensor, reduction)
        else:
            self._two_shots(_sign(Collective.ALL_REDUCE, len(tensor), reduction, tensor.dtype), tensor, reduction)

    def _get_small(self, tensor: torch.Tensor, reduction: Reduction) -> SmallReduction:
        key = (len(tensor), tensor.dtype, reduction.number)
        found = self._small.get(key)
        if found is None:
            if len(self._small) >= _MOST_SMALL:
                self._small.clear()
            found = self._small[key] = SmallReduction(self._slots, reduction, len(tensor), tensor.dtype)
        return found

    def reduce(self, tensor: torch.Tensor, reduction: Reduction, root: int, *, signature: int | None = None) -> None:
        """Replace the values of rank `root` by their reduction over all ranks. Other ranks keep theirs.

        Args:
            tensor: The values of this rank.
            reduction: How they are combined.
            root: The rank that gets the result. It compares the calls of all ranks.
            signature: The call that this is a part of, which the ranks compare. Default: this one.
        """
        if self._slots.size == 1:
            return
        if signature is None:
            signature = _sign(Collective.REDUCE, len(tensor), reduction, tensor.dtype, root)
        if tensor.nbytes * self._slots.size <= ONE_SHOT_BYTES:
            self._one_shot(signature, tensor, reduction, root=root)
        else:
            self._two_shots(signature, tensor, reduction, root=root)

    def reduce_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor], reduction: Reduction) -> None:
        """Reduce `inputs[r]` over all ranks for each rank r, into its `output`. The inputs may differ in length."""
        shared = self.tensors.find_parts(inputs)
        if shared is None or not self._reduce_scatter_shared(output, shared, reduction):
            self._reduce_scatter_private(output, inputs, reduction)

    def _reduce_scatter_private(self, output: torch.Tensor, inputs: list[torch.Tensor], reduction: Reduction) -> None:
        """Reduce and scatter as if no tensor were shared."""
        slots, signals, rank, dtype = self._slots, self._slots.signals, self._slots.rank, output.dtype
        width = slots.region_bytes // output.element_size()
        signature = _sign(Collective.REDUCE_SCATTER, sum(map(len, inputs)), reduction, dtype)
        first = True
        for start, end in split_rounds(max(map(len, inputs)), width):
            half = slots.begin_round((signature, 0) if first else ())
            views = slots.view(half, dtype)
            for peer, values in enumerate(inputs):
                part = values[start:end]
                if peer != rank and len(part):
                    views[rank][peer * width :][: len(part)].copy_(part)
            phase = signals.post()
            signals.wait_for_all(phase)
            if first:
                self._require_same(half, signature)
                if self._has_shared_call(half):
                    self._reduce_scatter_private(output, inputs, reduction)
                    return
            part = inputs[rank][start:end]
            if len(part):
                sources = [view[rank * width :][: len(part)] for view in views]
                sources[rank] = part
                reduction.reduce(sources, output[start:end])
            first = False

    def _one_shot(self, signature: int, tensor: torch.Tensor, reduction: Reduction, *, root: int | None = None) -> None:
        """See note [one shot]."""
        slots, signals, rank = self._slots, self._slots.signals, self._slots.rank
        most = HALF_BYTES // tensor.element_size()
        for start, end in split_rounds(len(tensor), most):
            half = slots.begin_round((signature, 0) if start == 0 else ())
            piece = tensor if end - start == len(tensor) else tensor[start:end]
            views = slots.cut(half, tensor.dtype, end - start)
            if root != rank:
                views[rank].copy_(piece)
            phase = signals.post()
            if root in (None, rank):
                signals.wait_for_all(phase)
                if start == 0:
                    self._require_same(half, signature)
                    if self._has_shared_call(half):
                        self._one_shot(signature, tensor, reduction, root=root)
                        return
                views[rank] = piece
                reduction.reduce(views, piece)

    def _two_shots(
        self, signature: int, tensor: torch.Tensor, reduction: Reduction, *, root: int | None = None
    ) -> None:
        """See note [two shots]."""
        slots, signals, rank = self._slots, self._slots.signals, self._slots.rank
        most = HALF_BYTES // tensor.element_size()
        for start, end in split_rounds(len(tensor), most):
            half = slots.begin_round((signature, 0) if start == 0 else ())
            piece, views = tensor[start:end], slots.view(half, tensor.dtype)
            shares = split_shares(len(piece), slots.size)
            first, last = shares[rank]
            views[rank][:first].copy_(piece[:first])
            views[rank][last : len(piece)].copy_(piece[last:])
            signals.wait_for_all(signals.post())
            if start == 0:
                self._require_same(half, signature)
                if self._has_shared_call(half):
                    self._two_shots(signature, tensor, reduction, root=root)
                    return
            sources = [view[first:last] for view in views]
            sources[rank] = piece[first:last]
            reduction.reduce(sources, views[rank][first:last])
            phase = signals.post()
            if root in (None, rank):
                for owner in range(rank, rank + slots.size):
                    first, last = shares[owner % slots.size]
                    signals.wait_for(owner % slots.size, phase)
                    piece[first:last].copy_(views[owner % slots.size][first:last])

    def _all_reduce_shared(self, tensor: torch.Tensor, shared: SharedTensor, reduction: Reduction) -> bool:
        """See note [shared tensors]. Returns False if a rank passes another tensor; nothing has then been changed."""
        slots, signals, rank = self._slots, self._slots.signals, self._slots.rank
        signature = _sign(Collective.ALL_REDUCE, len(tensor), reduction, tensor.dtype)
        if not self._begin_shared(signature, shared):
            return False
        first, last = split_shares(len(tensor), slots.size)[rank]
        width = max(1, SHARED_PIECE_BYTES // slots.size // tensor.element_size())
        pieces = zip(*(part[first:last].split(width) for part in shared.parts), strict=True)
        for sources in pieces if first < last else ():
            own = sources[rank]
            reduction.reduce(sources, own)
            for source in sources:
                if source is not own:
                    source.copy_(own)
        signals.wait_for_all(signals.post())
        torch.autograd.graph.increment_version(tensor)  # the parts are other tensors over the same memory
        return True

    def _reduce_scatter_shared(self, output: torch.Tensor, shared: SharedTensor, reduction: Reduction) -> bool:
        """See note [shared tensors]. Returns False if a rank passes another tensor; nothing has then been changed."""
        signals, count, size = self._slots.signals, len(output), self._slots.size
        signature = _sign(Collective.REDUCE_SCATTER, count * size, reduction, output.dtype)
        if not self._begin_shared(signature, shared):
            return False
        first = self.rank * count
        reduction.reduce([part[first : first + count] for part in shared.parts], output)
        signals.wait_for_all(signals.post())  # nobody reads the others' tensors any more
        return True

    def _begin_shared(self, signature: int, shared: SharedTensor) -> bool:
        """Wait for all ranks, and return whether all of them pass their parts of one allocation."""
        slots, signals = self._slots, self._slots.signals
        half = slots.begin_round((signature, shared.number))
        signals.wait_for_all(signals.post())
        self._require_same(half, signature)
        return all(signals.read_table(peer, half, 1) == shared.number for peer in range(slots.size))

    def _has_shared_call(self, half: int) -> bool:
        """Whether a rank passes a tensor in shared memory while this one does not. They then both start again."""
        signals = self._slots.signals
        # Not whether this rank still has such tensors: another may, when this one's are gone.
        has_any = self.tensors.allocations > 0
        return has_any and any(signals.read_table(peer, half, 1) for peer in range(self._slots.size))

    def _require_same(self, half: int, signature: int) -> None:
        for rank in range(self._slots.size):
            self._slots.require_signature(half, signature, rank)


def _sign(collective: Collective, count: int, reduction: Reduction, dtype: torch.dtype, root: int | None = None) -> int:
    return encode_signature(collective, count=count, root=root or 0, dtype=dtype, reduction=reduction.number)

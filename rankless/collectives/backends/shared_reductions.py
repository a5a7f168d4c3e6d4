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

Note [small reductions]: `SmallReduction` makes one shot in one round, in as few Python statements as possible: they are
most of its time. Everything that does not depend on the call is computed before.

Note [owners]: `SharedTensors` has the tensors of a group in memory that all its ranks map. The caller owns a tensor,
and the group only knows it. So a group keeps no memory of tensors that are gone, and a tensor outlives its group. This
rank's tensor has a storage of its own over the mapped memory, so that its uses can be counted. The memory is unmapped
with the last tensor over it.
"""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakMethod, WeakValueDictionary

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from rankless.collectives.backends.double_buffered_slots import HALF_BYTES, Slots, split_rounds, split_shares
from rankless.collectives.backends.operation_signature import Collective, encode_signature, sign_reduction
from rankless.collectives.backends.reductions import Reduction
from rankless.collectives.backends.shared_memory_mapping import SharedRegion

ONE_SHOT_BYTES = 64 << 10
"""The most bytes that ranks always reduce in one shot, all ranks' values together."""
SHARED_PIECE_BYTES = 512 << 10
"""So much of shared tensors, of all ranks together, is reduced and copied at a time."""
_MOST_SMALL = 256
"""So many lengths of small tensors are remembered."""


class SmallReduction:
    """The all_reduce of a certain number of values of one dtype.

    Args:
        slots: The memory of the group, which has at least two ranks.
        reduction: How values are combined.
        count: The number of values. They fit into a half of a slot.
        dtype: The dtype of the values.
    """

    def __init__(self, slots: Slots, reduction: Reduction, count: int, dtype: torch.dtype) -> None:
        self._slots, self._signals, self._words = slots, slots.signals, slots.signals.words
        self._reduction = reduction
        self._signature = encode_signature(Collective.ALL_REDUCE, count=count, dtype=dtype, reduction=reduction.number)
        tables = slots.signals.layout.table
        peers = [rank for rank in range(slots.size) if rank != slots.rank]
        self._own_tables = [tables(slots.rank, half) for half in range(2)]
        self._peer_tables = [[(rank, tables(rank, half)) for rank in peers] for half in range(2)]
        self._views = [slots.cut(half, dtype, count) for half in range(2)]
        self._own_views = [views[slots.rank] for views in self._views]

    def run(self, values: torch.Tensor) -> None:
        """Replace the values, flat and contiguous, by their reduction over all ranks. Raises as `SharedReductions`."""
        words, signals, signature = self._words, self._signals, self._signature
        half = self._slots.begin_round()
        signals.check()
        table = self._own_tables[half]
        words[table], words[table + 1] = signature, 0
        self._own_views[half].copy_(values)
        signals.wait_for_all(signals.post())
        for rank, table in self._peer_tables[half]:
            if words[table] != signature:
                self._slots.require_signature(half, signature, rank)
        self._reduction.reduce(self._views[half], values)


class SharedTensor:
    """The parts of all ranks of one allocation.

    Args:
        number: The number of the allocation, equal on all ranks.
        parts: The flat tensor of each rank, in mapped memory.
        reserved_bytes: What it takes of each rank's memory.
    """

    def __init__(self, number: int, parts: list[torch.Tensor], reserved_bytes: int) -> None:
        self.number, self.parts, self.reserved_bytes = number, parts, reserved_bytes
        self.on_close: WeakMethod[Callable[[], None]] | None = None


class SharedTensors:
    """The tensors that one group has allocated and that are still used. See note [owners]."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._by_tensor = WeakTensorKeyDictionary()
        self._by_address: WeakValueDictionary[int, SharedTensor] = WeakValueDictionary()
        self.allocations = 0
        """How many there have been, equal on all ranks."""

    @property
    def reserved_bytes(self) -> int:
        """What the tensors that are still used take of this rank's memory."""
        return sum(shared.reserved_bytes for shared in list(self._by_address.values()))

    def add(
        self, region: SharedRegion, count: int, dtype: torch.dtype, on_close: Callable[[], None] | None
    ) -> torch.Tensor:
        """Divide a region between the ranks, each part for `count` values, and return this rank's part."""
        stride = len(region.bytes) // self._size
        with torch.inference_mode(False):
            parts = [part[: count * dtype.itemsize].view(dtype) for part in region.bytes.split(stride)]
            own: torch.Tensor = parts[self._rank]
            if count:
                own = torch.frombuffer(region.memory, dtype=dtype, count=count, offset=stride * self._rank)
        shared = SharedTensor(self.allocations, parts, stride)
        if on_close is not None:
            shared.on_close = WeakMethod(on_close)
        self._by_tensor[own] = shared
        if count:
            self._by_address[own.data_ptr()] = shared
        return own

    def find(self, tensor: torch.Tensor) -> SharedTensor | None:
        """Return the allocation of which a flat tensor has the first values of this rank's part, or all of them."""
        shared = self._by_address.get(tensor.data_ptr())
        if shared is None or len(tensor) > len(shared.parts[0]) or tensor.dtype != shared.parts[0].dtype:
            return None
        return shared

    def find_parts(self, tensors: Sequence[torch.Tensor]) -> SharedTensor | None:
        """Return the allocation of which flat tensors are equal parts of this rank's part, one after the other."""
        first = tensors[0]
        shared = self.find(first) if len(first) else None
        if shared is None or len(first) * len(tensors) > len(shared.parts[0]):
            return None
        places = range(first.data_ptr(), first.data_ptr() + first.nbytes * len(tensors), first.nbytes)
        are_parts = all(
            len(tensor) == len(first) and tensor.data_ptr() == place
            for tensor, place in zip(tensors, places, strict=True)
        )
        return shared if are_parts else None

    def close(self) -> None:
        """Forget all tensors, and tell their owners."""
        for shared in list(self._by_address.values()):
            released = shared.on_close() if shared.on_close is not None else None
            if released is not None:
                released()
        self._by_tensor.clear()
        self._by_address.clear()


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
        signature = sign_reduction(Collective.ALL_REDUCE, len(tensor), reduction.number, tensor.dtype)
        if size == 2:
            self._one_shot(signature, tensor, reduction)
        else:
            self._two_shots(signature, tensor, reduction)

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
            signature = sign_reduction(Collective.REDUCE, len(tensor), reduction.number, tensor.dtype, root)
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
        signature = sign_reduction(Collective.REDUCE_SCATTER, sum(map(len, inputs)), reduction.number, dtype)
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
        signature = sign_reduction(Collective.ALL_REDUCE, len(tensor), reduction.number, tensor.dtype)
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
        signature = sign_reduction(Collective.REDUCE_SCATTER, count * size, reduction.number, output.dtype)
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

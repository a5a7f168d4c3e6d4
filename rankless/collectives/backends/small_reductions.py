"""all_reduce of few values, in as few Python statements as possible: they are most of its time.

It does what `SharedReductions` calls one shot, in one round, with everything computed before that does not depend on
the call.
"""

import torch

from rankless.collectives.backends.operation_signature import Collective, encode_signature
from rankless.collectives.backends.reductions import Reduction
from rankless.collectives.backends.slots import Slots


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

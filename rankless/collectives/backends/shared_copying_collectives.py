"""broadcast, all_gather, gather, scatter, all_to_all and barrier in the slots of a group.

See note [halves] in `double_buffered_slots`. What is sent to one rank only has its own region in a half.
"""

from collections.abc import Sequence

import torch

from rankless.collectives.backends.double_buffered_slots import HALF_BYTES, Slots, split_rounds
from rankless.collectives.backends.operation_signature import Collective, encode_signature


class SharedMovement:
    """The collectives of one group that move values and do not combine them.

    All tensors are flat, contiguous and of dtype uint8, one byte per element. All methods raise `CollectiveError` if
    another rank ends, aborts, is late or makes another call; the group cannot be used afterwards.

    Args:
        slots: The memory of the group.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self.rank, self.size = slots.rank, slots.size

    def barrier(self) -> None:
        """Return when all ranks have called this."""
        slots, signals = self._slots, self._slots.signals
        signature = encode_signature(Collective.BARRIER)
        half = slots.begin_round((signature,))
        signals.wait_for_all(signals.post())
        for rank in range(slots.size):
            slots.require_signature(half, signature, rank)

    def compare_calls(self, signature: int) -> None:
        """Let the first rank compare the signatures of all ranks' calls. The others do not wait for it."""
        slots, signals = self._slots, self._slots.signals
        half = slots.begin_round((signature,))
        phase = signals.post()
        if slots.rank == 0:
            signals.wait_for_all(phase)
            for rank in range(slots.size):
                slots.require_signature(half, signature, rank)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy the bytes of rank `root` to all ranks."""
        slots, signals = self._slots, self._slots.signals
        signature = encode_signature(Collective.BROADCAST, count=len(tensor), root=root)
        for start, end in split_rounds(len(tensor), HALF_BYTES):
            half = slots.begin_round((signature,) if start == 0 else ())
            slot = slots.view(half)[root][: end - start]
            if slots.rank == root:
                slot.copy_(tensor[start:end])
                signals.post()
                continue
            signals.wait_for(root, signals.post())
            if start == 0:
                slots.require_signature(half, signature, root)
            tensor[start:end].copy_(slot)

    def all_gather(self, value: torch.Tensor, outputs: Sequence[torch.Tensor], *, signature: int | None = None) -> None:
        """Copy each rank's bytes into all ranks' `outputs[rank]`. Ranks may have different numbers of bytes.

        Args:
            value: This rank's bytes.
            outputs: Where the bytes of each rank go.
            signature: The call that this is a part of, which the ranks compare. Default: this one.
        """
        if signature is None:
            signature = encode_signature(Collective.ALL_GATHER)
        self._gather(signature, value, outputs, max(map(len, outputs)))

    def gather(self, value: torch.Tensor, outputs: Sequence[torch.Tensor] | None, root: int) -> None:
        """Copy each rank's bytes, equally many, into `outputs[rank]` of rank `root`. The others' outputs are None."""
        signature = encode_signature(Collective.GATHER, count=len(value), root=root)
        self._gather(signature, value, outputs, len(value))

    def _gather(
        self, signature: int, value: torch.Tensor, outputs: Sequence[torch.Tensor] | None, longest: int
    ) -> None:
        slots, signals, rank = self._slots, self._slots.signals, self._slots.rank
        for start, end in split_rounds(longest, HALF_BYTES):
            half = slots.begin_round((signature, len(value)) if start == 0 else ())
            views, part = slots.view(half), value[start:end]
            if len(part):
                views[rank][: len(part)].copy_(part)
            phase = signals.post()
            if outputs is None:
                continue
            for peer in [*range(rank + 1, slots.size), *range(rank)]:
                signals.wait_for(peer, phase)
                if start == 0:
                    slots.require_signature(half, signature, peer)
                    slots.require_length(half, 1, peer, len(outputs[peer]))
                if len(part := outputs[peer][start:end]):
                    part.copy_(views[peer][: len(part)])
        if outputs is not None and outputs[rank].data_ptr() != value.data_ptr():
            outputs[rank].copy_(value)

    def scatter(self, output: torch.Tensor, values: Sequence[torch.Tensor] | None, root: int) -> None:
        """Copy `values[rank]` of rank `root`, all equally long, to each rank's output. The others' values are None."""
        slots, signals, rank = self._slots, self._slots.signals, self._slots.rank
        signature = encode_signature(Collective.SCATTER, count=len(output), root=root)
        width = slots.region_bytes
        for start, end in split_rounds(len(output), width):
            half = slots.begin_round((signature,) if start == 0 else ())
            slot = slots.view(half)[root]
            if values is not None:
                for peer, value in enumerate(values):
                    if peer != rank:
                        slot[peer * width :][: end - start].copy_(value[start:end])
                signals.post()
                continue
            signals.wait_for(root, signals.post())
            if start == 0:
                slots.require_signature(half, signature, root)
            output[start:end].copy_(slot[rank * width :][: end - start])
        if values is not None:
            output.copy_(values[rank])

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Copy `inputs[j]` of rank i to `outputs[i]` of rank j. Lengths may differ, and may be 0."""
        slots, signals, rank, width = self._slots, self._slots.signals, self._slots.rank, self._slots.region_bytes
        signature = encode_signature(Collective.ALL_TO_ALL)
        longest = max(map(len, inputs))
        start = 0
        while start == 0 or start < longest:
            half = slots.begin_round((signature, longest, *map(len, inputs)) if start == 0 else ())
            views = slots.view(half)
            for peer, value in enumerate(inputs):
                if peer != rank and len(part := value[start : start + width]):
                    views[rank][peer * width :][: len(part)].copy_(part)
            signals.wait_for_all(signals.post())
            if start == 0:
                for peer in range(slots.size):
                    slots.require_signature(half, signature, peer)
                    slots.require_length(half, 2 + rank, peer, len(outputs[peer]))
                # Only now is the number of rounds known, which is the same on all ranks.
                longest = max(signals.read_table(peer, half, 1) for peer in range(slots.size))
            for peer, output in enumerate(outputs):
                if peer != rank and len(part := output[start : start + width]):
                    part.copy_(views[peer][rank * width :][: len(part)])
            start += width
        outputs[rank].copy_(inputs[rank])

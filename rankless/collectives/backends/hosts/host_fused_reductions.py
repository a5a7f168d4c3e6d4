"""all_reduce of several tensors as if they were one, for ranks on several hosts."""

from rankless.collectives.backends.fused_reductions import FusedCall, copy_each, cut_pieces, split_as
from rankless.collectives.backends.hosts.host_reductions import HostReductions

PIECE_BYTES = 16 << 20
"""So much is reduced at a time. `HostReductions` cuts it again: it sends one part while it reduces another."""


class HostFusedReductions:
    """The all_reduce of several tensors, for one group on several hosts, with the method of `FusedReductions`.

    Args:
        reductions: The group's reductions of one tensor.
    """

    def __init__(self, reductions: HostReductions) -> None:
        self._reductions = reductions

    def all_reduce(self, call: FusedCall) -> None:
        """Reduce the inputs over all ranks into the outputs. Raises as `HostReductions`."""
        most = PIECE_BYTES // call.inputs[0].element_size()
        for sources, targets in zip(cut_pieces(call.inputs, most), cut_pieces(call.outputs, most), strict=True):
            values = targets[0] if len(targets) == 1 else targets[0].new_empty(sum(map(len, targets)))
            if values.data_ptr() != sources[0].data_ptr():
                copy_each(sources, split_as(values, sources))
            call.before(values)
            self._reductions.all_reduce(values, call.reduction)
            call.after(values)
            if len(targets) > 1:
                copy_each(split_as(values, targets), targets)

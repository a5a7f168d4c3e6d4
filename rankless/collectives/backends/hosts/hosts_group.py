"""A group of processes of several hosts: everything that it holds, from its opening to its closing."""

from collections.abc import Callable
from typing import Any

import torch

from rankless.collectives.backends.fused_reductions import FusedCall, copy_each, cut_pieces, split_as
from rankless.collectives.backends.group_failure import Membership
from rankless.collectives.backends.hosts.gloo_exchange import GlooExchange
from rankless.collectives.backends.hosts.host_movement import HostMovement
from rankless.collectives.backends.hosts.host_reductions import HostReductions
from rankless.collectives.backends.hosts.host_waits import FirstFailure, HostWaits
from rankless.collectives.backends.hosts.leader_exchange import LeaderExchange
from rankless.collectives.backends.hosts.ranks_of_hosts import RanksOfHosts
from rankless.collectives.backends.operation_queue import OperationQueue
from rankless.collectives.backends.shared_group import SharedGroup
from rankless.errors import CollectiveError
from rankless.records.group_failures import FailureKind

Operation = Callable[[], None]


class HostsGroup:
    """What a group on several hosts holds. It has the attributes of `SharedGroup` that a process group uses.

    Args:
        member: This process's place in the group.
        layout: The hosts of the group.
        failure: Tells all ranks why the group ended.
        local: The shared memory of this rank's host; None for a rank that is alone on its host.
        leaders: Connects the first ranks of the hosts; None for other ranks.
        everyone: Connects all ranks.
    """

    def __init__(
        self,
        member: Membership,
        layout: RanksOfHosts,
        failure: FirstFailure,
        *,
        local: SharedGroup | None,
        leaders: GlooExchange | None,
        everyone: GlooExchange,
    ) -> None:
        self.layout, self._local, self._everyone = layout, local, everyone
        self._exchanges = (everyone,) if leaders is None else (everyone, leaders)
        self.signals = HostWaits(member, layout, local=local, exchanges=self._exchanges, failure=failure)
        names = [member.global_ranks[rank] for rank in layout.leaders]
        between = None if leaders is None else LeaderExchange(leaders, names)
        self.reductions = HostReductions(layout, self.signals, local=local, leaders=between)
        self.fused_reductions = HostFusedReductions(self.reductions)
        self.movement = HostMovement(layout, self.signals, local=local, leaders=between, everyone=everyone)
        self.queue = _GuardedQueue(self.signals)

    @property
    def messages(self) -> Any:
        """The Gloo group of all ranks, which carries messages from one rank to another."""
        return self._everyone.group

    def allocate(
        self,
        count: int,  # noqa: ARG002
        dtype: torch.dtype,  # noqa: ARG002
        *,
        limit_bytes: int | None = None,  # noqa: ARG002
        on_close: Callable[[], None] | None = None,  # noqa: ARG002
    ) -> None:
        """Return None: ranks of several hosts share no memory."""
        self.signals.check()

    def map_common(self, byte_count: int, terms: str) -> None:  # noqa: ARG002
        """Return None, as `allocate`."""
        self.signals.check()

    def abort(self) -> None:
        """End the group for all ranks: their waits raise at once."""
        self.signals.abort(FailureKind.ABORTED)

    def interrupt(self) -> None:
        """End the group for all ranks, because this one has raised an exception where others wait in it."""
        self.signals.abort(FailureKind.LEFT)

    def close(self) -> None:
        """Leave the group. Operations that are not done fail. In a forked process this does nothing."""
        if self.signals.is_forked:
            return
        self.signals.close()
        if self._local is not None:
            self._local.close()
        self.queue.close()
        for exchange in self._exchanges:
            exchange.close()


class _GuardedQueue(OperationQueue):
    """A queue whose operations end the group on all ranks if they fail.

    Args:
        waits: The waits of the group.
    """

    def __init__(self, waits: HostWaits) -> None:
        super().__init__(lambda: waits.abort(FailureKind.INTERRUPTED))
        self._waits = waits

    def _execute(self, operation: Operation) -> None:
        # All of `_guard` is in the operation: an interrupt while it reports a failure ends the group, too.
        super()._execute(lambda: self._guard(operation))

    def _guard(self, operation: Operation) -> None:
        try:
            self._waits.check()
            operation()
        except CollectiveError as error:
            self._waits.fail(error)


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

"""A group of processes of several hosts: everything that it holds, from its opening to its closing."""

import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rankless.collectives.backends.fused_reductions import FusedCall, copy_each, cut_pieces, split_as
from rankless.collectives.backends.group_failure_errors import Membership
from rankless.collectives.backends.hosts.gloo_exchange import GlooExchange
from rankless.collectives.backends.hosts.host_movement import HostMovement
from rankless.collectives.backends.hosts.host_reductions import HostReductions
from rankless.collectives.backends.hosts.host_waits import FirstFailure, HostWaits
from rankless.collectives.backends.hosts.leader_exchange import LeaderExchange
from rankless.collectives.backends.hosts.ranks_of_hosts import RanksOfHosts
from rankless.collectives.backends.operation_queue import OperationQueue
from rankless.collectives.backends.shared_group import SharedGroup, open_shared_group
from rankless.collectives.backends.store_exchange import StoreExchange, do_nothing
from rankless.collectives.shared_memory_file import host_identity
from rankless.config.shared_memory_support import Support, is_supported
from rankless.errors import CollectiveError
from rankless.records.group_failure_codes import FailureKind

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
        self.must_be_abortable = member.must_be_abortable
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


ONE_RANK_PER_HOST = Support("every host has one rank of the group")


def open_hosts_group(
    store: Any,
    member: Membership,
    timeout: timedelta,
    *,
    objection: str = "",
    host: str | None = None,
    check: Callable[[], None] = do_nothing,
) -> HostsGroup | SharedGroup | Support:
    """Open a group of processes of several hosts.

    Args:
        store: A `torch.distributed.Store` of the group's ranks, with keys that no earlier group has used.
        member: This process's place in the group.
        timeout: How long the ranks wait for each other.
        objection: Why this rank does not want such a group. Default: none.
        host: What ranks of the same host have in common. Default: `find_host_name()`.
        check: Called while waiting. It raises if the wait is in vain. Default: nothing.

    Returns:
        The group; that of one host if all ranks are on it. On all ranks, why there is none, if a rank objects or its
        machine does not support it, a host has no memory, or every host has one rank only and Gloo may connect them.

    Raises:
        CollectiveError: A rank does not call this within the timeout, or its process has ended.
        RuntimeError: The ranks cannot connect to each other.
    """
    exchange = StoreExchange(store, "hosts", rank=member.rank, size=member.size, timeout=timeout)
    exchange.check = check
    own = {"host": host if host is not None else find_host_name(), "objection": objection or is_supported().reason}
    answers = [json.loads(answer) for answer in exchange.gather("host", json.dumps(own))]
    layout = RanksOfHosts.from_identities(member.rank, [answer["host"] for answer in answers])
    support = _find_support(member, [answer["objection"] for answer in answers])
    if not support:
        return support
    if len(layout.hosts) == 1:
        return open_shared_group(_derive(store, "one host"), member, timeout, check=check)
    if len(layout.hosts) == member.size and not member.must_be_abortable:
        return ONE_RANK_PER_HOST
    return _open(store, exchange, member, layout, timeout)


def find_host_name() -> str:
    """Return a text that two processes have in common only if they share memory, process ids and network devices."""
    try:
        return f"{host_identity()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return host_identity()


def _open(
    store: Any, exchange: StoreExchange, member: Membership, layout: RanksOfHosts, timeout: timedelta
) -> HostsGroup | Support:
    try:
        local = _open_memory(store, member, layout, timeout, exchange.check)
    except CollectiveError as error:
        exchange.publish("opened", json.dumps({"failure": str(error.found)}))
        raise
    with ExitStack() as resources:
        if isinstance(local, SharedGroup):
            resources.callback(local.close)
        support = _agree(exchange, member, local)
        if not support or isinstance(local, Support):
            return support
        leaders = None
        if layout.is_leader:
            leaders = GlooExchange(_derive(store, "leaders"), layout.host, len(layout.hosts), timeout)
        everyone = GlooExchange(_derive(store, "everyone"), member.rank, member.size, timeout)
        group = HostsGroup(member, layout, FirstFailure(store), local=local, leaders=leaders, everyone=everyone)
        resources.pop_all()
    return group


def _agree(exchange: StoreExchange, member: Membership, local: SharedGroup | Support | None) -> Support:
    """Return whether all ranks have opened the memory of their host."""
    own = {"reason": local.reason if isinstance(local, Support) else ""}
    answers = [json.loads(answer) for answer in exchange.gather("opened", json.dumps(own))]
    for rank, answer in enumerate(answers):
        if "failure" in answer:
            raise CollectiveError(
                expected="all ranks of the group to open the memory of their host",
                found=f"rank {member.global_ranks[rank]}: {answer['failure']}",
                fix="see why it failed there",
            )
    return _find_support(member, [answer["reason"] for answer in answers])


def _open_memory(
    store: Any, member: Membership, layout: RanksOfHosts, timeout: timedelta, check: Callable[[], None]
) -> SharedGroup | Support | None:
    members = layout.members
    if len(members) == 1:
        return None
    local = Membership(
        rank=members.index(member.rank),
        global_ranks=tuple(member.global_ranks[rank] for rank in members),
        timeout_seconds=member.timeout_seconds,
    )
    return open_shared_group(_derive(store, f"host {layout.host}"), local, timeout, check=check)


def _find_support(member: Membership, reasons: Sequence[str]) -> Support:
    """Return whether no rank has a reason against the group, else the first reason."""
    for rank, reason in enumerate(reasons):
        if reason:
            return Support(f"rank {member.global_ranks[rank]}: {reason}")
    return Support("")


def _derive(store: Any, name: str) -> Any:
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]  # not in the stubs

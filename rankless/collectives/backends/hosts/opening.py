"""Opens the memory of each host and the connections between hosts, if all ranks can and want to."""

import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rankless.collectives.backends.group_failure import Membership
from rankless.collectives.backends.hosts.gloo_exchange import GlooExchange
from rankless.collectives.backends.hosts.host_waits import FirstFailure
from rankless.collectives.backends.hosts.hosts_group import HostsGroup
from rankless.collectives.backends.hosts.ranks_of_hosts import RanksOfHosts
from rankless.collectives.backends.shared_group import SharedGroup, open_shared_group
from rankless.collectives.backends.store_exchange import StoreExchange, do_nothing
from rankless.collectives.shared_memory_file import host_identity
from rankless.config.shared_memory_support import Support, is_supported
from rankless.errors import CollectiveError

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

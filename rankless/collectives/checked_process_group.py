"""The queue of checked collectives that belongs to a process group of `torch.distributed`, made at the first call."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout

from rankless.collectives.backends import SharedMemoryProcessGroup
from rankless.collectives.call_signature import Call
from rankless.collectives.checked_collective_queue import CollectiveQueue, Issue, PendingWork
from rankless.collectives.collective_check import CheckRendezvous, open_collective_check
from rankless.errors import ConfigError

AnyGroup = dist.ProcessGroup | None
"""What a script passes as `group`: None means all ranks of the job."""

Channel = tuple[int, int, int]
"""Sender, receiver and tag. Messages of one channel arrive in the order in which they are sent."""


@dataclass(frozen=True)
class GroupQueues:
    """The queues of a group: one for its collectives, and one for each channel of messages."""

    collectives: CollectiveQueue
    channels: dict[Channel, CollectiveQueue]
    timeout: timedelta
    rank: int
    size: int


_group_queues: WeakKeyDictionary[dist.ProcessGroup, GroupQueues] = WeakKeyDictionary()
"""Module state, by exception: torch's groups are global and take no attributes. An entry dies with its group."""


@dataclass(frozen=True)
class CheckedGroup:
    """A process group with its queues, and this process's rank in it."""

    torch: dist.ProcessGroup
    queues: GroupQueues
    rank: int
    size: int

    @property
    def queue(self) -> CollectiveQueue:
        """The queue of the group's collectives."""
        return self.queues.collectives

    def channel(self, sender: int, receiver: int, tag: int) -> CollectiveQueue:
        """Return the queue of the messages from one rank of the group to another."""
        name = (sender, receiver, tag)
        if name not in self.queues.channels:
            point = CheckRendezvous(
                store=self.torch.get_group_store(),
                name=f"channel-{sender}-{receiver}-{tag}",
                timeout=self.queues.timeout,
                notify=notify,
            )
            open_check = partial(
                open_collective_check, point, index=int(self.rank == receiver), ranks=(sender, receiver)
            )
            self.queues.channels[name] = CollectiveQueue(open_check, self.queues.timeout)
        return self.queues.channels[name]

    def run(self, call: Call, issue: Issue, async_op: bool, timeout: timedelta | None = None) -> PendingWork | None:
        """Check the ranks' calls and run a collective: to its end, or with `async_op` return the work to wait for."""
        if async_op:
            return self.queue.start(call, issue, timeout=timeout)
        self.queue.run(call, issue, timeout=timeout)
        return None

    @contextmanager
    def report_refusals(self, operation: str, queue: CollectiveQueue | None = None) -> Iterator[None]:
        """Report a `ConfigError` about this rank's arguments to the other ranks, which would wait for its call.

        `queue` is that of the channel if the call is a message.
        """
        try:
            yield
        except ConfigError as error:
            (queue or self.queue).refuse(operation, str(error.found))
            raise error.with_traceback(None) from None

    def resolve_rank(self, global_rank: int | None, group_rank: int | None, role: str, default: int | None = 0) -> int:
        """Return the rank in the group that an argument names. Raises `ConfigError` for none, two, or one outside."""
        if global_rank is not None and group_rank is not None:
            raise ConfigError(
                expected=f"{role}= (a rank of the job) or group_{role}= (a rank of the group)",
                found=f"{role}={global_rank} and group_{role}={group_rank}",
                fix="leave one out",
            )
        members = dist.get_process_group_ranks(self.torch)
        if group_rank is None and global_rank is None:
            group_rank = default
        found = members.index(global_rank) if global_rank in members else group_rank
        if found is None or not 0 <= found < self.size:
            given = f"{role}={global_rank}" if global_rank is not None else f"group_{role}={group_rank}"
            raise ConfigError(
                expected=f"{role} to be one of the ranks {members} of the group",
                found=given,
                fix=f"pass one of them, or a group that rank {global_rank} belongs to",
            )
        return found


def resolve_group(group: dist.ProcessGroup | None) -> CheckedGroup | None:
    """Return the group with its queues, for None that of the whole job. Returns None in a process outside the group.

    Raises `ConfigError` before the process has joined a job.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            expected="a process that joins its job before the first collective",
            found="torch.distributed without a process group",
            fix="call rankless.init() first",
        )
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup):
        return None
    queues = _group_queues.get(found)
    if queues is None:
        if dist.get_rank(found) < 0:
            return None
        queues = _group_queues[found] = _make_group_queues(found)
    return CheckedGroup(found, queues, queues.rank, queues.size)


def _make_group_queues(group: dist.ProcessGroup) -> GroupQueues:
    rank, size, timeout = dist.get_rank(group), dist.get_world_size(group), _timeout_of(group)
    if size == 1:
        return GroupQueues(CollectiveQueue(lambda: None, timeout), {}, timeout, rank, size)
    point = CheckRendezvous(store=group.get_group_store(), name="collectives", timeout=timeout, notify=notify)
    open_check = partial(open_collective_check, point, index=rank, ranks=range(size))
    return GroupQueues(CollectiveQueue(open_check, timeout), {}, timeout, rank, size)


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    if isinstance(group, SharedMemoryProcessGroup):
        return group.timeout
    device = torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu")
    try:
        timeout = group._get_backend(device).options._timeout
    except (RuntimeError, AttributeError):
        return default_pg_timeout
    return timeout if isinstance(timeout, timedelta) else default_pg_timeout


def notify(text: str) -> None:
    """Print a notice to stderr."""
    print(f"rankless: {text}", file=sys.stderr, flush=True)

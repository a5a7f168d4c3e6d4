"""Messages from one rank to another, with the names, signatures and process groups of `torch.distributed`.

Before each message its two ranks compare what they are about to call. Messages with one sender, receiver and tag arrive
in the order in which they are sent.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rankless.collectives.argument_checks import describe_tensor, require_usable
from rankless.collectives.call_signature import Call
from rankless.collectives.checked_collective_queue import CombinedWork, PendingWork
from rankless.collectives.checked_process_group import AnyGroup, Channel, CheckedGroup, notify, resolve_group
from rankless.collectives.collective_check import NOTIFY_INTERVAL_SECONDS
from rankless.collectives.mesh_collectives import is_copied
from rankless.errors import CollectiveError, ConfigError
from rankless.user_code import caller_line

OPERATION = "send and recv"
_POLL_SECONDS = 0.0005


def send(
    tensor: Tensor, dst: int | None = None, group: AnyGroup = None, tag: int = 0, group_dst: int | None = None
) -> None:
    """Send `tensor` to another rank, and return when that rank receives it.

    Args:
        tensor: The tensor to send, contiguous.
        dst: The receiver, as a rank of the job.
        group: The process group. Default: all ranks of the job.
        tag: Distinguishes messages between two ranks: only calls of one tag match. Default: 0.
        group_dst: The receiver, as a rank of the group, instead of `dst`.

    Raises:
        ConfigError: An argument is invalid, or the process has not joined a job.
        CollectiveError: The other rank's call does not match or is missing.

    Example:
        >>> def exchange(rank):
        ...     rankless.init()
        ...     tensor = torch.full((1,), float(rank))
        ...     collectives.send(tensor, 1) if rank == 0 else collectives.recv(tensor, 0)
        ...     return tensor.item()
        >>> rankless.spawn(exchange, nprocs=2)
        [0.0, 0.0]
    """
    if (checked := resolve_group(group)) is not None:
        channel = _channel_to(checked, tensor, dst, group_dst, tag)
        checked.channel(*channel).run(_call(tensor), partial(_issue, "send", tensor, checked, channel))


def isend(
    tensor: Tensor, dst: int | None = None, group: AnyGroup = None, tag: int = 0, group_dst: int | None = None
) -> PendingWork | None:
    """Begin to send `tensor` to another rank.

    Args:
        tensor: The tensor to send, contiguous.
        dst: The receiver, as a rank of the job.
        group: The process group. Default: all ranks of the job.
        tag: Distinguishes messages between two ranks: only calls of one tag match. Default: 0.
        group_dst: The receiver, as a rank of the group, instead of `dst`.

    Returns:
        The work to wait for, with `wait(timeout)` and `is_completed()`. None in a process outside the group.

    Raises:
        ConfigError: An argument is invalid, or the process has not joined a job.
        CollectiveError: The other rank's call does not match or is missing; `wait` raises it.

    Example:
        >>> def exchange(rank):
        ...     rankless.init()
        ...     tensor = torch.full((1,), float(rank))
        ...     work = collectives.isend(tensor, 1) if rank == 0 else collectives.irecv(tensor, 0)
        ...     return work.wait()
        >>> rankless.spawn(exchange, nprocs=2)
        [True, True]
    """
    if (checked := resolve_group(group)) is None:
        return None
    channel = _channel_to(checked, tensor, dst, group_dst, tag)
    return checked.channel(*channel).start(_call(tensor), partial(_issue, "send", tensor, checked, channel))


def recv(
    tensor: Tensor, src: int | None = None, group: AnyGroup = None, tag: int = 0, group_src: int | None = None
) -> int:
    """Overwrite `tensor` with what another rank sends.

    Args:
        tensor: Where to put the message: of the shape and dtype that is sent, contiguous.
        src: The sender, as a rank of the job. Default: any rank, the first that sends.
        group: The process group. Default: all ranks of the job.
        tag: Distinguishes messages between two ranks: only calls of one tag match. Default: 0.
        group_src: The sender, as a rank of the group, instead of `src`.

    Returns:
        The sender, as a rank of the job; -1 in a process outside the group.

    Raises:
        ConfigError: An argument is invalid, or the process has not joined a job.
        CollectiveError: The other rank's call does not match or is missing.

    Example:
        >>> def exchange(rank):
        ...     rankless.init()
        ...     tensor = torch.full((1,), float(rank))
        ...     collectives.send(tensor, 1) if rank == 0 else collectives.recv(tensor)
        ...     return tensor.item()
        >>> rankless.spawn(exchange, nprocs=2)
        [0.0, 0.0]
    """
    if (checked := resolve_group(group)) is None:
        return -1
    if src is None and group_src is None:
        channel = _check_tensor(checked, tensor, _wait_for_first_sender(checked, tag))
    else:
        channel = _channel_from(checked, tensor, src, group_src, tag)
    checked.channel(*channel).run(_call(tensor), partial(_issue, "recv", tensor, checked, channel))
    return dist.get_global_rank(checked.torch, channel[0])


def irecv(
    tensor: Tensor, src: int | None = None, group: AnyGroup = None, tag: int = 0, group_src: int | None = None
) -> PendingWork | None:
    """Begin to overwrite `tensor` with what another rank sends.

    Args:
        tensor: Where to put the message: of the shape and dtype that is sent, contiguous.
        src: The sender, as a rank of the job.
        group: The process group. Default: all ranks of the job.
        tag: Distinguishes messages between two ranks: only calls of one tag match. Default: 0.
        group_src: The sender, as a rank of the group, instead of `src`.

    Returns:
        The work to wait for, with `wait(timeout)` and `is_completed()`. None in a process outside the group.

    Raises:
        ConfigError: An argument is invalid, no sender is given, or the process has not joined a job.
        CollectiveError: The other rank's call does not match or is missing; `wait` raises it.

    Example:
        >>> def exchange(rank):
        ...     rankless.init()
        ...     tensor = torch.full((1,), float(rank))
        ...     work = collectives.isend(tensor, 1) if rank == 0 else collectives.irecv(tensor, 0)
        ...     return work.wait()
        >>> rankless.spawn(exchange, nprocs=2)
        [True, True]
    """
    if (checked := resolve_group(group)) is None:
        return None
    if src is None and group_src is None:
        raise ConfigError(
            expected="irecv with the rank that it receives from",
            found="no src=",
            fix="pass src=, or use recv, which receives from the rank that sends first",
        )
    channel = _channel_from(checked, tensor, src, group_src, tag)
    return checked.channel(*channel).start(_call(tensor), partial(_issue, "recv", tensor, checked, channel))


class P2POp:
    """One message of a `batch_isend_irecv`.

    Args:
        op: `isend` or `irecv`.
        tensor: The tensor to send, or where to put the message.
        peer: The other rank, as a rank of the job.
        group: The process group. Default: all ranks of the job.
        tag: Distinguishes messages between two ranks: only calls of one tag match. Default: 0.
        group_peer: The other rank, as a rank of the group, instead of `peer`.

    Raises:
        ConfigError: `op` is another function.

    Example:
        >>> operation = collectives.P2POp(collectives.isend, torch.ones(2), peer=1)
        >>> operation.is_send
        True
    """

    def __init__(
        self,
        op: Callable[..., PendingWork | None],
        tensor: Tensor,
        peer: int | None = None,
        group: AnyGroup = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op not in (isend, irecv, dist.isend, dist.irecv):
            raise ConfigError(
                expected="isend or irecv as the operation of a P2POp",
                found=getattr(op, "__name__", repr(op)),
                fix="pass rankless.collectives.isend or rankless.collectives.irecv",
            )
        self.is_send = op in (isend, dist.isend)
        self.arguments: dict[str, Any] = {"tensor": tensor, "group": group, "tag": tag}
        role = "dst" if self.is_send else "src"
        self.arguments |= {role: peer, f"group_{role}": group_peer}


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[PendingWork]:
    """Begin several messages at once.

    Args:
        p2p_op_list: The messages.

    Returns:
        The work of each message, to wait for.

    Raises:
        ConfigError: An argument is invalid, or the process has not joined a job.
        CollectiveError: The other rank's call does not match or is missing; `wait` raises it.

    Example:
        >>> def exchange(rank):
        ...     rankless.init()
        ...     received = torch.zeros(1)
        ...     send = collectives.P2POp(collectives.isend, torch.full((1,), float(rank)), 1 - rank)
        ...     receive = collectives.P2POp(collectives.irecv, received, 1 - rank)
        ...     for work in collectives.batch_isend_irecv([send, receive]):
        ...         _ = work.wait()
        ...     return received.item()
        >>> rankless.spawn(exchange, nprocs=2)
        [1.0, 0.0]
    """
    works = [(isend if operation.is_send else irecv)(**operation.arguments) for operation in p2p_op_list]
    return [work for work in works if work is not None]


def start_send(tensor: Tensor, *, group: dist.ProcessGroup, target: int, tag: int = 0) -> PendingWork:
    """Begin to send a contiguous tensor to a rank of a group. The caller keeps it as it is until the work is done."""
    if not is_copied(tensor, group):
        return _require_member(dist.isend(tensor, group=group, tag=tag, group_dst=target))
    data = tensor.detach().cpu()
    work = _require_member(dist.isend(data, group=group, tag=tag, group_dst=target))
    return CombinedWork([work], data.numel)  # which keeps the data


def start_receive(tensor: Tensor, *, group: dist.ProcessGroup, source: int, tag: int = 0) -> PendingWork:
    """Begin to receive a contiguous tensor from a rank of a group."""
    if not is_copied(tensor, group):
        return _require_member(dist.irecv(tensor, group=group, tag=tag, group_src=source))
    data = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    work = _require_member(dist.irecv(data, group=group, tag=tag, group_src=source))
    return CombinedWork([work], lambda: tensor.detach().copy_(data))


def _call(tensor: Tensor) -> Call:
    return Call(operation=OPERATION, settings=describe_tensor(tensor))


def _issue(kind: str, tensor: Tensor, checked: CheckedGroup, channel: Channel, async_op: bool) -> PendingWork | None:
    sender, receiver, tag = channel
    if kind == "send":
        work = start_send(tensor, group=checked.torch, target=receiver, tag=tag)
    else:
        work = start_receive(tensor, group=checked.torch, source=sender, tag=tag)
    if async_op:
        return work
    work.wait()
    return None


def _channel_to(checked: CheckedGroup, tensor: Tensor, dst: int | None, group_dst: int | None, tag: int) -> Channel:
    peer = _resolve_other_rank(checked, dst, group_dst, "dst")
    return _check_tensor(checked, tensor, (checked.rank, peer, tag))


def _channel_from(checked: CheckedGroup, tensor: Tensor, src: int | None, group_src: int | None, tag: int) -> Channel:
    peer = _resolve_other_rank(checked, src, group_src, "src")
    return _check_tensor(checked, tensor, (peer, checked.rank, tag))


def _check_tensor(checked: CheckedGroup, tensor: Tensor, channel: Channel) -> Channel:
    """Return the channel if the backend can take the tensor. Otherwise raise, here and on the other rank."""
    with checked.report_refusals(OPERATION, checked.channel(*channel)):
        require_usable(checked, tensor)
    return channel


def _resolve_other_rank(checked: CheckedGroup, rank: int | None, group_rank: int | None, role: str) -> int:
    peer = checked.resolve_rank(rank, group_rank, role, default=None)
    if peer == checked.rank:
        raise ConfigError(
            expected="another rank to send to, or to receive from",
            found=f"rank {peer}, which is this one",
            fix="copy the tensor instead",
        )
    return peer


def _wait_for_first_sender(checked: CheckedGroup, tag: int) -> Channel:
    """Return the channel of the first rank that sends. Waits up to the group's timeout, and notifies the user."""
    store = checked.torch.get_group_store()
    start = received = time.monotonic()
    while True:
        for sender in range(checked.size):
            if sender == checked.rank:
                continue
            channel = (sender, checked.rank, tag)
            queue = checked.channel(*channel)
            if not queue.is_open and not store.check([f"rankless/channel-{sender}-{checked.rank}-{tag}/0/openings"]):
                continue
            collective_check = queue.get_check()
            if collective_check is not None and collective_check.is_peer_waiting():
                return channel
        now = time.monotonic()
        if now - received > NOTIFY_INTERVAL_SECONDS:
            received = now
            notify(f"{caller_line()}: waiting for any rank to send, {now - start:.0f} s")
        if now - start > checked.queues.timeout.total_seconds():
            raise CollectiveError(
                expected=f"some rank to send to rank {checked.rank} with tag {tag}",
                found=f"none in {now - start:.1f} s",
                fix="compare tag and group with the sender's; see what the other ranks do: py-spy dump --pid",
                where=caller_line(),
            )
        time.sleep(_POLL_SECONDS)


def _require_member(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this process is not in the group"
    return work

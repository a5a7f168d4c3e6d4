"""Messages from one rank to another, with torch.distributed's names and signatures, each after a roll call of the two.

As under torch.distributed the messages of one sender, receiver and tag arrive in the order in which they are sent.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rankless.collectives.argument_checks import require_usable, text_of
from rankless.collectives.call_signature import Call
from rankless.collectives.checked_collectives import Awaited
from rankless.collectives.collective_check import TELL_AFTER_SECONDS
from rankless.collectives.process_groups import AnyGroup, Group, Lane, joined_group, notify
from rankless.errors import CollectiveError, ConfigError
from rankless.user_code import caller_line

OPERATION = "send and recv"
_NAP_SECONDS = 0.0005


def send(
    tensor: Tensor, dst: int | None = None, group: AnyGroup = None, tag: int = 0, group_dst: int | None = None
) -> None:
    """Send `tensor` to rank `dst`, and return once that rank takes it."""
    if (joined := joined_group(group)) is not None:
        lane = _lane_to(joined, tensor, dst, group_dst, tag)
        joined.lane(*lane).run(_call(tensor), partial(_issue, "send", tensor, joined, lane))


def isend(
    tensor: Tensor, dst: int | None = None, group: AnyGroup = None, tag: int = 0, group_dst: int | None = None
) -> Awaited | None:
    """Begin to send `tensor` to rank `dst`."""
    if (joined := joined_group(group)) is None:
        return None
    lane = _lane_to(joined, tensor, dst, group_dst, tag)
    return joined.lane(*lane).start(_call(tensor), partial(_issue, "send", tensor, joined, lane))


def recv(
    tensor: Tensor, src: int | None = None, group: AnyGroup = None, tag: int = 0, group_src: int | None = None
) -> int:
    """Overwrite `tensor` with what rank `src` sends, of any rank that sends first if none is named; the sender's rank.

    -1 for a process outside of the group.
    """
    if (joined := joined_group(group)) is None:
        return -1
    if src is None and group_src is None:
        lane = _checked(joined, tensor, _first_lane(joined, tag))
    else:
        lane = _lane_from(joined, tensor, src, group_src, tag)
    joined.lane(*lane).run(_call(tensor), partial(_issue, "recv", tensor, joined, lane))
    return dist.get_global_rank(joined.torch, lane[0])


def irecv(
    tensor: Tensor, src: int | None = None, group: AnyGroup = None, tag: int = 0, group_src: int | None = None
) -> Awaited | None:
    """Begin to overwrite `tensor` with what rank `src` sends."""
    if (joined := joined_group(group)) is None:
        return None
    if src is None and group_src is None:
        raise ConfigError(
            expected="irecv with the rank that it takes from",
            found="no src=",
            fix="name it, or use recv, which takes from whoever sends first",
        )
    lane = _lane_from(joined, tensor, src, group_src, tag)
    return joined.lane(*lane).start(_call(tensor), partial(_issue, "recv", tensor, joined, lane))


class P2POp:
    """One message of a batch: `op` is `isend` or `irecv`, the others are its arguments."""

    def __init__(
        self,
        op: Callable[..., Awaited | None],
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
        self.sends = op in (isend, dist.isend)
        self.arguments: dict[str, Any] = {"tensor": tensor, "group": group, "tag": tag}
        role = "dst" if self.sends else "src"
        self.arguments |= {role: peer, f"group_{role}": group_peer}


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Awaited]:
    """Begin several messages at once; wait on each that is returned."""
    works = [(isend if operation.sends else irecv)(**operation.arguments) for operation in p2p_op_list]
    return [work for work in works if work is not None]


def _call(tensor: Tensor) -> Call:
    return Call(operation=OPERATION, settings=text_of(tensor))


def _issue(kind: str, tensor: Tensor, joined: Group, lane: Lane, late: bool) -> Awaited | None:
    sender, receiver, tag = lane
    if kind == "send":
        work = dist.isend(tensor, group=joined.torch, tag=tag, group_dst=receiver)
    else:
        work = dist.irecv(tensor, group=joined.torch, tag=tag, group_src=sender)
    if late or work is None:
        return work
    work.wait()
    return None


def _lane_to(joined: Group, tensor: Tensor, dst: int | None, group_dst: int | None, tag: int) -> Lane:
    peer = _other(joined, joined.rank_of(dst, group_dst, "dst", default=None))
    return _checked(joined, tensor, (joined.rank, peer, tag))


def _lane_from(joined: Group, tensor: Tensor, src: int | None, group_src: int | None, tag: int) -> Lane:
    peer = _other(joined, joined.rank_of(src, group_src, "src", default=None))
    return _checked(joined, tensor, (peer, joined.rank, tag))


def _checked(joined: Group, tensor: Tensor, lane: Lane) -> Lane:
    """The lane, if the tensor can travel on it; if not, the other rank hears of it too."""
    with joined.telling(OPERATION, joined.lane(*lane)):
        require_usable(joined, tensor)
    return lane


def _other(joined: Group, peer: int) -> int:
    if peer == joined.rank:
        raise ConfigError(
            expected="another rank to send to, or to take from",
            found=f"rank {peer}, which is this one",
            fix="copy the tensor instead",
        )
    return peer


def _first_lane(joined: Group, tag: int) -> Lane:
    """The lane of a rank that has begun to send; waits for one as long as the group's timeout, and says so."""
    store = joined.torch.get_group_store()
    start = told = time.monotonic()
    while True:
        for sender in range(joined.size):
            if sender == joined.rank:
                continue
            lane = (sender, joined.rank, tag)
            queue = joined.lane(*lane)
            if not queue.is_open and not store.check([f"rankless/lane-{sender}-{joined.rank}-{tag}/0/openings"]):
                continue
            collective_check = queue.opened()
            if collective_check is not None and collective_check.is_awaited():
                return lane
        now = time.monotonic()
        if now - told > TELL_AFTER_SECONDS:
            told = now
            notify(f"{caller_line()}: waiting for any rank to send, {now - start:.0f} s")
        if now - start > joined.queues.timeout.total_seconds():
            raise CollectiveError(
                expected=f"some rank to send to rank {joined.rank} with tag {tag}",
                found=f"none in {now - start:.1f} s",
                fix="look at what the others do instead: py-spy dump --pid; is it the same tag and group?",
                where=caller_line(),
            )
        time.sleep(_NAP_SECONDS)

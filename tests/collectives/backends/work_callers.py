"""The code of torch 2.13 that waits for a `Work`, or takes its future: the callers that a failed collective must reach.

Each entry prepares a call with collectives that succeed on all ranks, and returns the call, which fails if a rank of
the group does not take part. The C++ callers are DistributedDataParallel's reducer and its builtin hooks,
`_broadcast_coalesced`, and `wait_tensor`. The others are Python. Left out: rpc, and what needs an accelerator.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as autograd_functions
from collectives.backends.training_callers import DDP, LIBRARIES, Prepare
from torch.distributed import distributed_c10d


def _ones(count: int = 8) -> torch.Tensor:
    return torch.ones(count)


def _list(group: Any) -> list[torch.Tensor]:
    return [_ones() for _ in range(group.size())]


def _coalesce(group: Any, *, is_async: bool) -> None:
    with distributed_c10d._coalescing_manager(group, async_ops=is_async) as manager:
        dist.all_reduce(_ones(), group=group)
        dist.all_reduce(_ones(3), group=group)
    if is_async:
        manager.wait()


def _exchange(group: Any) -> None:
    """Receive from the second rank of the group, which sends to the first."""
    if group.rank() == 1:
        dist.send(_ones(), group=group, group_dst=0)
    else:
        dist.recv(_ones(), group=group, group_src=1)


def _exchange_in_a_batch(group: Any) -> None:
    other = dist.get_global_rank(group, 1 if group.rank() != 1 else 0)
    operations = [dist.P2POp(dist.isend, _ones(), other, group), dist.P2POp(dist.irecv, _ones(), other, group)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _send_objects(group: Any) -> None:
    if group.rank() == 1:
        dist.send_object_list([1], group=group, group_dst=0)
    else:
        dist.recv_object_list([None], group=group, group_src=1)


CALLS: dict[str, Callable[[Any], object]] = {
    "all_reduce": lambda group: dist.all_reduce(_ones(), group=group),
    "all_reduce, long": lambda group: dist.all_reduce(_ones(1_000_000), group=group),
    "all_reduce_coalesced": lambda group: dist.all_reduce_coalesced([_ones(), _ones(3)], group=group),
    "broadcast": lambda group: dist.broadcast(_ones(), group=group, group_src=1),
    "reduce": lambda group: dist.reduce(_ones(), group=group, group_dst=0),
    "all_gather": lambda group: dist.all_gather(_list(group), _ones(), group=group),
    "all_gather_into_tensor": lambda group: dist.all_gather_into_tensor(_ones(8 * group.size()), _ones(), group=group),
    "all_gather_coalesced": lambda group: dist.all_gather_coalesced([_list(group)], [_ones()], group=group),
    "gather": lambda group: dist.gather(_ones(), _list(group) if group.rank() == 0 else None, group_dst=0, group=group),
    "scatter": lambda group: dist.scatter(
        _ones(), _list(group) if group.rank() == 1 else None, group_src=1, group=group
    ),
    "reduce_scatter": lambda group: dist.reduce_scatter(_ones(), _list(group), group=group),
    "reduce_scatter_tensor": lambda group: dist.reduce_scatter_tensor(_ones(), _ones(8 * group.size()), group=group),
    "all_to_all": lambda group: dist.all_to_all(_list(group), _list(group), group=group),
    "all_to_all_single": lambda group: dist.all_to_all_single(
        _ones(8 * group.size()), _ones(8 * group.size()), group=group
    ),
    "barrier": lambda group: dist.barrier(group=group),
    "monitored_barrier": lambda group: group.monitored_barrier(),
    "recv": _exchange,
    "batch_isend_irecv": _exchange_in_a_batch,
    "all_gather_object": lambda group: dist.all_gather_object([None] * group.size(), 1, group=group),
    "gather_object": lambda group: dist.gather_object(
        1, [None] * group.size() if group.rank() == 0 else None, group_dst=0, group=group
    ),
    "broadcast_object_list": lambda group: dist.broadcast_object_list([1], group_src=1, group=group),
    "scatter_object_list": lambda group: dist.scatter_object_list(
        [None], list(range(group.size())), group_src=1, group=group
    ),
    "recv_object_list": _send_objects,
    "coalescing manager": lambda group: _coalesce(group, is_async=False),
    "coalescing manager, async": lambda group: _coalesce(group, is_async=True),
    "_broadcast_coalesced": lambda group: dist._broadcast_coalesced(group, [_ones(), _ones(3)], 1024, 1),
    "nn.functional.all_reduce": lambda group: autograd_functions.all_reduce(_ones(), group=group),
    "nn.functional.all_gather": lambda group: autograd_functions.all_gather(_ones(), group=group),
    "nn.functional.all_to_all_single": lambda group: autograd_functions.all_to_all_single(
        _ones(8 * group.size()), _ones(8 * group.size()), group=group
    ),
    "functional all_reduce": lambda group: functional.all_reduce(_ones(), "sum", group).sum().item(),
    "functional wait_tensor": lambda group: functional.wait_tensor(functional.all_reduce(_ones(), "sum", group)),
    "functional broadcast": lambda group: functional.broadcast(_ones(), 1, group).sum().item(),
    "functional all_gather": lambda group: functional.all_gather_tensor(_ones(), 0, group).sum().item(),
    "functional reduce_scatter": lambda group: (
        functional.reduce_scatter_tensor(_ones(8 * group.size()), "sum", 0, group).sum().item()
    ),
    "functional all_to_all": lambda group: (
        functional.all_to_all_single(_ones(8 * group.size()), None, None, group).sum().item()
    ),
    "functional all_reduce_coalesced": lambda group: (
        functional.all_reduce_coalesced([_ones(), _ones(3)], "sum", group)[1].sum().item()
    ),
    "functional permute_tensor": lambda group: (
        functional.permute_tensor(_ones(), [*range(1, group.size()), 0], group).sum().item()
    ),
}
"""Calls of one line."""


def _start(group: Any) -> Any:
    return dist.all_reduce(_ones(), group=group, async_op=True)


def _wait_then(group: Any) -> object:
    return _start(group).get_future().then(lambda future: future.value()[0] + 1).wait()


def _wait_value(group: Any) -> object:
    future = _start(group).get_future()
    try:
        future.wait()
    except RuntimeError:
        return future.value()
    return None


def _wait_late(group: Any) -> object:
    """Take the future of a work that has failed before."""
    work = _start(group)
    try:
        work.wait()
    except RuntimeError:
        assert work.is_completed()
        assert not work.is_success()
        assert isinstance(work.exception(), RuntimeError)
        return work.get_future().wait()
    return None


def _wrap_future(group: Any) -> object:
    """Make a work of the future. Its `wait` returns True even for a future that has failed; `result` raises."""
    work = torch._C._distributed_c10d._create_work_from_future(_start(group).get_future())
    work.wait()
    return work.result()


def _drop(group: Any) -> object:
    """Drop a work, and learn at the next call that it has failed."""
    _start(group)
    _start(group).get_future()
    functional.all_reduce(_ones(), "sum", group)
    return dist.all_reduce(_ones(), group=group)


def _call_back(group: Any) -> object:
    """Read the outcome in a callback, which cannot raise to anybody."""
    found: list[Any] = []

    def callback(future: Any) -> None:
        try:
            found.append(future.value())
        except RuntimeError as error:
            found.append(error)

    future = _start(group).get_future()
    future.add_done_callback(callback)
    if isinstance(future.then(lambda done: done.done() and found[0]).wait(), RuntimeError):
        raise found[0]
    return None


FUTURES: dict[str, Callable[[Any], object]] = {
    "work.wait": lambda group: _start(group).wait(),
    "work.synchronize": lambda group: _start(group).synchronize(),
    "future.wait": lambda group: _start(group).get_future().wait(),
    "future.value": _wait_value,
    "future.then": _wait_then,
    "future.add_done_callback": _call_back,
    "future of a failed work": _wait_late,
    "collect_all": lambda group: torch.futures.wait_all([_start(group).get_future(), _start(group).get_future()]),
    "collect_all's futures": lambda group: torch.futures.collect_all([_start(group).get_future()]).wait()[0].value(),
    "_create_work_from_future": _wrap_future,
    "dropped": _drop,
}
"""What a script does with the work of an asynchronous call."""


CALLERS: dict[str, Prepare] = {
    **{name: (lambda group, call=call: lambda: call(group)) for name, call in (CALLS | FUTURES).items()},
    **DDP,
    **LIBRARIES,
}

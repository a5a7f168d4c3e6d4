"""Submits operations under handles, and returns the results of handles."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import Function

from rankless.extensions.horovod import context
from rankless.extensions.horovod.common.process_sets import ProcessSet, global_process_set
from rankless.extensions.horovod.engine.requests import GROUPED_PREFIX, EngineRequest, OperationKind
from rankless.extensions.horovod.torch.operations.checks import resolve_set_id

Fields = dict[str, Any]
"""The fields of an `EngineRequest` besides kind, name and process set."""


class GroupHandle(int):
    """The handle of a grouped operation. Its result is a list, even for a group of one tensor."""


def submit(kind: OperationKind, name: str | None, process_set: ProcessSet, fields: Callable[[], Fields]) -> int:
    """Submit one operation and return its handle.

    `fields` returns those of an `EngineRequest`. If it raises, the operation fails on the other ranks, too. An
    operation without a name gets a number as its name.
    """
    scheduler = context.current().scheduler
    set_id = resolve_set_id(process_set, kind)
    name = name or scheduler.new_name(set_id)
    handle = scheduler.new_handle()
    with _refusal(set_id, [EngineRequest(kind=kind, name=name).key]):
        request = EngineRequest(kind=kind, name=name, set_id=set_id, **fields())
    scheduler.submit(handle, [request])
    return handle


def submit_group(
    kind: OperationKind, name: str | None, process_set: ProcessSet, members: Sequence[Callable[[], Fields]]
) -> GroupHandle:
    """Submit a group of operations, which are executed together, and return their handle.

    Each of `members` returns the fields of an `EngineRequest`. If one raises, the group fails on the other ranks.
    """
    if not members:
        raise ValueError(f"A grouped {kind.value} needs at least one tensor.")
    scheduler = context.current().scheduler
    set_id = resolve_set_id(process_set, kind)
    name = name or scheduler.new_name(set_id)
    handle = scheduler.new_handle()
    with _refusal(set_id, [one.key for one in make_group_requests(kind, name, set_id, [{} for _ in members])]):
        requests = make_group_requests(kind, name, set_id, [fields() for fields in members])
    scheduler.submit(handle, requests)
    return GroupHandle(handle)


@contextmanager
def _refusal(set_id: int, keys: Sequence[str]) -> Iterator[None]:
    """Let the other ranks' operations with these keys fail if the block raises."""
    try:
        yield
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        context.current().scheduler.refuse(set_id, keys, str(error).strip())
        raise


def make_group_requests(kind: OperationKind, name: str, set_id: int, members: Sequence[Fields]) -> list[EngineRequest]:
    """Return the requests of a group. Their keys are `grouped_….name_1of3`, `…_2of3`, `…_3of3`."""
    size = len(members)
    group = f"{GROUPED_PREFIX}{kind.value}.{name}"
    return [
        EngineRequest(kind=kind, name=f"{name}_{index}of{size}", set_id=set_id, group=group, group_size=size, **fields)
        for index, fields in enumerate(members, 1)
    ]


def poll(handle: int) -> bool:
    """Return whether `synchronize(handle)` would return at once. Raises ValueError for an unknown handle."""
    try:
        return context.current().scheduler.poll(handle)
    except KeyError:
        raise ValueError(f"Handle {handle} was not created or has been cleared.") from None


def synchronize(handle: int | Callable[[], torch.Tensor]) -> Any:
    """Wait for an operation's result and return it.

    Args:
        handle: The handle that an asynchronous call returned.

    Returns:
        A tensor. A list of tensors for a grouped operation. The rows and the received splits for an alltoall. None for
        an unknown handle, or one whose result was returned before.

    Raises:
        HorovodInternalError: The ranks' requests do not match, or a rank is gone. It is raised on every rank.
    """
    if not isinstance(handle, int):
        return handle() if callable(handle) else None
    if not context.is_initialized():
        return None
    scheduler = context.current().scheduler
    if not scheduler.has_handle(handle):
        return None
    results = scheduler.synchronize(handle)
    return results if isinstance(handle, GroupHandle) else _convert_result(results[0])


def _convert_result(result: Any) -> Any:
    """Return the result, with an alltoall's splits as a tensor."""
    if isinstance(result, tuple):
        return result[0], torch.tensor(result[1], dtype=torch.int32, device="cpu")
    return result


def apply_function(function: type[Function], *arguments: Any) -> Any:
    """Call `forward` and return its result, so that autograd calls `backward`."""
    return function.apply(*arguments)


SHARED_NAME = "noname"
"""One name for all calls, so that ranks with different counts of unnamed operations match."""


def join(device: int = -1) -> int:
    """Wait until all ranks have joined, and return the rank that joined last.

    Until then this rank takes part in the others' allreduces with zeros. An Average still divides by all ranks.

    Args:
        device: Ignored. Horovod allocates the zeros on this device. Rankless allocates them where they are needed.
    """
    last_rank: int = synchronize(submit(OperationKind.JOIN, SHARED_NAME, global_process_set, dict))
    return last_rank


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the process set have called this."""
    synchronize(submit(OperationKind.BARRIER, SHARED_NAME, process_set, dict))

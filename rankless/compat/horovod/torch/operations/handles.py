"""From a call to a handle, and from a handle to the result."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rankless.compat.horovod import context
from rankless.compat.horovod.common.process_sets import ProcessSet
from rankless.compat.horovod.engine.requests import GROUPED_PREFIX, OperationKind, OperationRequest
from rankless.compat.horovod.torch.operations.checks import resolve_set_id


class GroupHandle(int):
    """The handle of a grouped operation, whose result is a list also where the group has one tensor."""


def submit(kind: OperationKind, name: str | None, process_set: ProcessSet, **fields: Any) -> int:
    """The handle of one operation. `fields` are those of a Submission. Without a name, calls are counted."""
    scheduler = context.current().scheduler
    set_id = resolve_set_id(process_set, kind)
    handle = scheduler.new_handle()
    scheduler.submit(
        handle, [OperationRequest(kind=kind, name=name or scheduler.new_name(set_id), set_id=set_id, **fields)]
    )
    return handle


def submit_group(
    kind: OperationKind, name: str | None, process_set: ProcessSet, members: Sequence[dict[str, Any]]
) -> GroupHandle:
    """The handle of a group of operations, which are executed together; `members` are fields of their Submissions."""
    if not members:
        raise ValueError(f"A grouped {kind.value} needs at least one tensor.")
    scheduler = context.current().scheduler
    set_id = resolve_set_id(process_set, kind)
    handle = scheduler.new_handle()
    requests = make_group_requests(kind, name or scheduler.new_name(set_id), set_id, members)
    scheduler.submit(handle, requests)
    return GroupHandle(handle)


def make_group_requests(
    kind: OperationKind, name: str, set_id: int, members: Sequence[dict[str, Any]]
) -> list[OperationRequest]:
    """The submissions of a group: `grouped_….name_1of3`, `…_2of3`, `…_3of3` are their keys."""
    size = len(members)
    group = f"{GROUPED_PREFIX}{kind.value}.{name}"
    return [
        OperationRequest(
            kind=kind, name=f"{name}_{index}of{size}", set_id=set_id, group=group, group_size=size, **fields
        )
        for index, fields in enumerate(members, 1)
    ]


def poll(handle: int) -> bool:
    """Whether `synchronize(handle)` would return at once."""
    try:
        return context.current().scheduler.poll(handle)
    except KeyError:
        raise ValueError(f"Handle {handle} was not created or has been cleared.") from None


def synchronize(handle: int | Callable[[], torch.Tensor]) -> Any:
    """The operation's result, once it is there: a tensor; a list for a grouped one; tensor and received splits for
    alltoall. None for a handle that is not known, or whose result has been given out.

    Raises HorovodInternalError on every rank if the ranks do not fit together, or one is gone.
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
    """The result, with an alltoall's splits as a tensor."""
    if isinstance(result, tuple):
        return result[0], torch.tensor(result[1], dtype=torch.int32)
    return result

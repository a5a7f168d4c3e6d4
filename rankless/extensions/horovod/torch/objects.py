"""Broadcast and allgather of Python objects, which cloudpickle serializes."""

from typing import Any

import cloudpickle  # type: ignore[import-untyped]  # it has no types
import torch

from rankless.extensions.horovod import context
from rankless.extensions.horovod.common.process_sets import ProcessSet, global_process_set
from rankless.extensions.horovod.torch.operations.allgather import allgather_async
from rankless.extensions.horovod.torch.operations.broadcast import broadcast_
from rankless.extensions.horovod.torch.operations.handles import synchronize

DEFAULT_NAME = "object"
"""Horovod names an object by its type. If other ranks pass None, the names differ, and the ranks wait forever."""


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the root's object on every rank.

    Args:
        obj: The object to broadcast. Ranks other than the root may pass None.
        root_rank: The root's rank, counted over the whole job. Default 0.
        name: The name of the operation. Default "object".
        process_set: The ranks that take part. Default all.
    """
    name = name or DEFAULT_NAME
    is_root = context.current().world.rank == root_rank
    content = _pickle(obj) if is_root else torch.empty(0, dtype=torch.uint8, device="cpu")
    size = torch.tensor([content.numel()], device="cpu")
    broadcast_(size, root_rank, f"{name}.sz", process_set)
    if not is_root:
        content = torch.empty(int(size), dtype=torch.uint8, device="cpu")
    broadcast_(content, root_rank, f"{name}.t", process_set)
    return obj if is_root else _unpickle(content)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks, in rank order.

    Args:
        obj: This rank's object.
        name: The name of the operation. Default "object".
        process_set: The ranks that take part. Default all.
    """
    name = name or DEFAULT_NAME
    content = _pickle(obj)
    sizes_handle = allgather_async(torch.tensor([content.numel()], device="cpu"), f"{name}.sz", process_set)
    contents_handle = allgather_async(content, f"{name}.t", process_set)
    sizes = synchronize(sizes_handle).tolist()
    return [_unpickle(part) for part in synchronize(contents_handle).split(sizes)]


def _pickle(obj: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=torch.uint8)


def _unpickle(content: torch.Tensor) -> Any:
    return cloudpickle.loads(content.numpy().tobytes())

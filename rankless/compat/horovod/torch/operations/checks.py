"""What one rank alone can see is wrong with a call, in Horovod's words."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from rankless.compat.horovod import context
from rankless.compat.horovod.common.process_sets import ProcessSet
from rankless.compat.horovod.engine.requests import Kind

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

DTYPES = frozenset(
    {
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.float32,
        torch.float64,
        # Horovod refuses these two.
        torch.bfloat16,
        torch.bool,
    }
)


def takes_tensors(operation: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The operation, whose first argument must be a tensor, or tensors if it is of a group: TypeError for all else."""
    name = operation.__name__
    first = "tensors" if name.startswith("grouped_") else "tensor"

    @wraps(operation)
    def checked(*arguments: Parameters.args, **named: Parameters.kwargs) -> Result:
        given = arguments[0] if arguments else named.get(first)
        if not isinstance(given, torch.Tensor) and (arguments or first in named):
            _require_tensors(name, given, are_many=first == "tensors")
        return operation(*arguments, **named)

    return checked


def _require_tensors(name: str, given: Any, *, are_many: bool) -> None:
    if are_many and isinstance(given, list | tuple):
        others = [one for one in given if not isinstance(one, torch.Tensor)]
    else:
        others = [] if are_many and hasattr(given, "__iter__") else [given]
    if others:
        given, what = others[0], "torch.Tensors" if are_many else "a torch.Tensor"
        raise TypeError(
            f"\nexpected: {what} for hvd.{name}\nfound:    {given!r:.100}, of type {type(given).__name__}\n"
            "fix:      torch.tensor(value) makes one; hvd.allgather_object and hvd.broadcast_object take other objects"
        )


def sendable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, without its history. Raises ValueError for a kind of tensor that does not travel."""
    if tensor.layout is not torch.strided or tensor.dtype not in DTYPES:
        raise ValueError(f"Tensor type {tensor.type()} is not supported.")
    if not tensor.is_contiguous():
        raise ValueError("Tensor is required to be contiguous.")
    return tensor.detach() if tensor.requires_grad else tensor


def set_id_of(process_set: ProcessSet, kind: Kind) -> int:
    """The id of a set that this rank is part of. Raises ValueError for any other."""
    set_id = process_set.process_set_id
    if set_id == 0:
        return 0
    rank = context.current().world.rank
    if set_id is None:
        raise ValueError(
            f"{process_set} is not registered: pass it to hvd.init(process_sets=…) or hvd.add_process_set."
        )
    if rank not in process_set.ranks:
        raise ValueError(f"{kind.value.capitalize()}: Rank {rank} is not a member of the provided process set.")
    return set_id


def root_in(process_set: ProcessSet, root_rank: int) -> int:
    """The root, a rank of the job. Raises ValueError if the set does not have it."""
    if root_rank not in process_set.ranks:
        raise ValueError(f"broadcast received invalid root rank {root_rank} for provided process set")
    return root_rank


def splits_of(tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None, size: int) -> tuple[int, ...]:
    """How many rows go to each of `size` ranks. Raises ValueError for splits that cannot be meant."""
    if tensor.dim() == 0:
        raise ValueError("Alltoall needs a tensor with a first dimension; a tensor of 0 dimensions was given.")
    rows = tensor.shape[0]
    if splits is None or len(splits) == 0:
        if rows % size:
            raise ValueError(
                "splits not provided, but first dimension of tensor is not an even multiple of the number of workers."
            )
        return (rows // size,) * size
    counts = _whole_numbers(splits)
    if len(counts) != size:
        raise ValueError("Number of entries in splits does not equal number of workers.")
    if any(count < 0 for count in counts):
        raise ValueError(f"Entries of splits cannot be negative: {counts}.")
    if sum(counts) > rows:
        raise ValueError("Sum of splits entries is greater than the first dimension of tensor.")
    return counts


def _whole_numbers(splits: Any) -> tuple[int, ...]:
    entries = splits if isinstance(splits, torch.Tensor) else torch.tensor(splits, dtype=torch.int32)
    if entries.dim() > 1:
        raise ValueError("alltoall expects a 1D splits tensor")
    if entries.dtype is not torch.int32:
        raise ValueError("alltoall expects splits to contain 32-bit integer elements.")
    return tuple(entries.tolist())

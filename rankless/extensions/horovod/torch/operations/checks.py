"""Checks of a call that one rank can do alone. The error texts are Horovod's."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from rankless.extensions.horovod import context
from rankless.extensions.horovod.common.process_sets import ProcessSet
from rankless.extensions.horovod.engine.requests import OperationKind

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
        # Horovod itself does not support these two.
        torch.bfloat16,
        torch.bool,
    }
)


DEVICES = ("cpu", "cuda")


def require_tensors(operation: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Make an operation raise TypeError if its first argument is no tensor, or no tensors for a grouped operation."""
    name = operation.__name__
    first = "tensors" if name.startswith("grouped_") else "tensor"

    @wraps(operation)
    def checked(*arguments: Parameters.args, **named: Parameters.kwargs) -> Result:
        argument = arguments[0] if arguments else named.get(first)
        if not isinstance(argument, torch.Tensor) and (arguments or first in named):
            _require_tensors(name, argument, is_group=first == "tensors")
        return operation(*arguments, **named)

    return checked


def _require_tensors(name: str, argument: Any, *, is_group: bool) -> None:
    if is_group and isinstance(argument, list | tuple):
        invalid = [one for one in argument if not isinstance(one, torch.Tensor)]
    else:
        invalid = [] if is_group and hasattr(argument, "__iter__") else [argument]
    if invalid:
        argument, expected = invalid[0], "torch.Tensors" if is_group else "a torch.Tensor"
        raise TypeError(
            f"\nexpected: {expected} for hvd.{name}\nfound:    {argument!r:.100}, of type {type(argument).__name__}\n"
            "fix:      torch.tensor(value) makes one; hvd.allgather_object and hvd.broadcast_object take other objects"
        )


def validate_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without its autograd history. Raises ValueError for a tensor that cannot be sent."""
    if tensor.device.type not in DEVICES:
        raise ValueError(
            f"\nexpected: a tensor on the CPU or on a GPU\nfound:    one on the device {tensor.device}\n"
            'fix:      tensor.to("cpu") before the operation; a meta tensor has no values to send'
        )
    if tensor.layout is not torch.strided or tensor.dtype not in DTYPES:
        raise ValueError(f"Tensor type {tensor.type()} is not supported.")
    if not tensor.is_contiguous():
        raise ValueError("Tensor is required to be contiguous.")
    return tensor.detach() if tensor.requires_grad else tensor


def resolve_set_id(process_set: ProcessSet, kind: OperationKind) -> int:
    """Return the id of a process set. Raises ValueError unless it is registered and contains this rank."""
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


def validate_root_rank(process_set: ProcessSet, root_rank: int) -> int:
    """Return the root, a rank of the job. Raises ValueError if it is not in the process set."""
    if root_rank not in process_set.ranks:
        raise ValueError(f"broadcast received invalid root rank {root_rank} for provided process set")
    return root_rank


def resolve_splits(tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None, size: int) -> tuple[int, ...]:
    """Return the number of rows for each of `size` ranks. Raises ValueError for invalid splits."""
    if tensor.dim() == 0:
        raise ValueError("Alltoall needs a tensor with a first dimension; a tensor of 0 dimensions was given.")
    rows = tensor.shape[0]
    if splits is None or len(splits) == 0:
        if rows % size:
            raise ValueError(
                "splits not provided, but first dimension of tensor is not an even multiple of the number of workers."
            )
        return (rows // size,) * size
    counts = _convert_splits(splits)
    if len(counts) != size:
        raise ValueError("Number of entries in splits does not equal number of workers.")
    if any(count < 0 for count in counts):
        raise ValueError(f"Entries of splits cannot be negative: {counts}.")
    if sum(counts) > rows:
        raise ValueError("Sum of splits entries is greater than the first dimension of tensor.")
    return counts


def _convert_splits(splits: Any) -> tuple[int, ...]:
    entries = splits if isinstance(splits, torch.Tensor) else torch.tensor(splits, dtype=torch.int32, device="cpu")
    if entries.dim() > 1:
        raise ValueError("alltoall expects a 1D splits tensor")
    if entries.dtype is not torch.int32:
        raise ValueError("alltoall expects splits to contain 32-bit integer elements.")
    return tuple(entries.tolist())

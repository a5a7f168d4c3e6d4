"""What torch passes to the methods of a process group: its forms, and the checks of what a call can take."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rankless.collectives.backends.group_failure import Membership
from rankless.errors import CallError


def require_dense(tensors: Iterable[torch.Tensor]) -> None:
    """Raise a `CallError` unless all tensors are dense and in the memory of the CPU."""
    for tensor in tensors:
        if not tensor.is_cpu or tensor.layout is not torch.strided:
            raise CallError(
                expected="dense tensors on the CPU, because the group is in shared memory",
                found=f"a tensor with layout {tensor.layout} on {tensor.device}",
                fix="move it to the CPU and make it dense, or use another process group",
            )
        if tensor.is_neg():
            # Some dtypes have no negative. To find that out within the collective would end the group.
            tensor.detach().resolve_neg()


def require_count(tensors: Sequence[object], count: int, what: str) -> None:
    """Raise a `CallError` unless there are `count` of something that belongs to ranks."""
    if len(tensors) != count:
        raise CallError(expected=f"{count} {what}", found=f"{len(tensors)}", fix="pass one for each rank of the group")


def require_values(tensor: torch.Tensor, count: int, what: str) -> None:
    """Raise a `CallError` unless a tensor has `count` values."""
    if tensor.numel() != count:
        raise CallError(
            expected=f"{count} values in {what}",
            found=f"{tensor.numel()}, of shape {tuple(tensor.shape)}",
            fix="pass tensors whose sizes match",
        )


def require_one_dtype(tensors: Sequence[torch.Tensor]) -> None:
    """Raise a `CallError` unless all tensors have one dtype."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        raise CallError(
            expected="tensors of one dtype", found=sorted(map(str, dtypes)), fix="convert them to one dtype"
        )


def require_other_rank(rank: int, member: Membership) -> None:
    """Raise a `CallError` unless a rank is another one of the group."""
    if rank == member.rank or not 0 <= rank < member.size:
        raise CallError(
            expected=f"another rank of the group of {member.size} to send to or receive from",
            found=f"rank {rank} of the group, called on rank {member.rank}",
            fix="pass another rank of the group",
        )


def as_list(tensors: Any) -> list[Tensor]:
    """Return the tensors of `[…]`, or of one tensor."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def as_only_list(tensors: Any) -> list[Tensor]:
    """Return the tensors of `[[…]]` or `[…]`."""
    values = list(tensors)
    return list(values[0]) if len(values) == 1 and not isinstance(values[0], Tensor) else values


def get_operation(opts: Any) -> Any:
    """Return the reduction of torch's options, or of what stands in their place."""
    return getattr(opts, "reduceOp", dist.ReduceOp.SUM if opts is None else opts)


def get_root(opts: Any) -> int:
    """Return the root's rank in the group from torch's options, or from what stands in their place."""
    return int(getattr(opts, "rootRank", 0 if opts is None else opts))


def get_timeout_seconds(opts: Any, timeout: Any = None) -> float | None:
    """Return how long a call may wait, from its argument or torch's options; None for the group's timeout."""
    given = timeout if timeout is not None else getattr(opts, "timeout", None)
    # Unset options have a negative time.
    return given.total_seconds() if isinstance(given, timedelta) and given.days >= 0 and given else None


def split_bytes(tensor: Tensor, sizes: Sequence[int] | None, size: int) -> list[int]:
    """Return how many bytes of a tensor's rows are for each rank. Raises `CallError` for other split sizes."""
    rows = tensor.shape[0] if tensor.dim() else 1
    row_bytes = tensor.nbytes // max(1, rows)
    splits = list(sizes) if sizes else [rows // size] * size
    require_count(splits, size, "split sizes")
    if sum(splits) != rows or min(splits) < 0:
        raise CallError(
            expected=f"split sizes whose sum is the {rows} rows of the tensor",
            found=splits,
            fix="pass one size for each rank, or none for a tensor whose rows the ranks divide evenly",
        )
    return [rows * row_bytes for rows in splits]


class PreparedCall(NamedTuple):
    """A collective that is ready to run."""

    run: Callable[[], None]
    """Makes the collective, and writes its results."""
    written: Sequence[Tensor]
    """The tensors that it writes."""
    outputs: list[Any]
    """The value of its work, as torch arranges it."""


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the CPU, and its memory holds its values one after the other."""
    if not tensor.is_cpu or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return False
    return not tensor.is_neg() and not tensor.is_conj()


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values as a flat contiguous tensor: a view if it is plain, else a copy."""
    tensor = tensor.detach()
    if not is_plain(tensor):
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    if tensor.dim() != 1:
        tensor = tensor.view(-1)
    # A tensor of one value or none may have any stride.
    return tensor if tensor.stride(0) == 1 else tensor.as_strided((tensor.numel(),), (1,))


def flatten_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes as a flat contiguous uint8 tensor: a view if it is plain, else a copy."""
    flat = flatten(tensor)
    return flat if flat.dtype is torch.uint8 else flat.view(torch.uint8)


def write_back(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    """Copy the values of `flatten` or `flatten_bytes` to the tensor, if it is not plain."""
    if not is_plain(tensor):
        tensor.detach().copy_(flat.view(tensor.dtype).view(tensor.shape))


@contextmanager
def writable(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Allow changes of tensors that were made in `torch.inference_mode()`."""
    if any(tensor.is_inference() for tensor in tensors) and not torch.is_inference_mode_enabled():
        with torch.inference_mode():
            yield
    else:
        yield

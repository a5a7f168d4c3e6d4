"""Collectives that autograd sees: each returns a new tensor, and its backward is the transposed collective.

The gradient is that of the sum over all ranks of what each rank computes from its result, as if all ranks were one
script. Every rank must run the backward of each collective, in the same order.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ReduceOp

from rankless.collectives import data_movement, reducing_collectives
from rankless.collectives.checked_process_group import AnyGroup, CheckedGroup, resolve_group
from rankless.errors import ConfigError

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "reduce", "reduce_scatter"]


def all_reduce(tensor: Tensor, op: ReduceOp.RedOpType = ReduceOp.SUM, group: AnyGroup = None) -> Tensor:
    """Return the sum or the average of all ranks' tensors.

    Args:
        tensor: This rank's tensor, of one shape on all ranks.
        op: `ReduceOp.SUM` or `ReduceOp.AVG`, which are linear. Default: the sum.
        group: The process group. Default: all ranks of the job.

    Returns:
        A new tensor of the same shape.

    Raises:
        ConfigError: An argument is invalid, `op` is not linear, the process is outside the group, or it has not
            joined a job.
        CollectiveError: The ranks' calls do not match, or a rank does not make the call, in forward or backward.

    Example:
        >>> tensor = torch.ones(2, requires_grad=True)
        >>> differentiable.all_reduce(tensor).sum().backward()
        >>> tensor.grad
        tensor([1., 1.])
    """
    checked = _require_member(group)
    return _AllReduce.apply(tensor, _require_linear(op, "all_reduce"), checked)  # type: ignore[no-any-return,no-untyped-call]


def reduce(tensor: Tensor, dst: int = 0, op: ReduceOp.RedOpType = ReduceOp.SUM, group: AnyGroup = None) -> Tensor:
    """Return the sum or the average of all ranks' tensors on one rank, and zeros on the others.

    Args:
        tensor: This rank's tensor, of one shape on all ranks.
        dst: The destination, as a rank of the job. Default: 0.
        op: `ReduceOp.SUM` or `ReduceOp.AVG`, which are linear. Default: the sum.
        group: The process group. Default: all ranks of the job.

    Returns:
        A new tensor of the same shape.

    Raises:
        ConfigError: An argument is invalid, `op` is not linear, the process is outside the group, or it has not
            joined a job.
        CollectiveError: The ranks' calls do not match, or a rank does not make the call, in forward or backward.

    Example:
        >>> differentiable.reduce(torch.ones(2), dst=0)
        tensor([1., 1.])
    """
    checked = _require_member(group)
    root = checked.resolve_rank(dst, None, "dst")
    return _Reduce.apply(tensor, root, _require_linear(op, "reduce"), checked)  # type: ignore[no-any-return,no-untyped-call]


def broadcast(tensor: Tensor, src: int = 0, group: AnyGroup = None) -> Tensor:
    """Return the tensor of one rank on every rank.

    Args:
        tensor: The data on the source; on the others a tensor of the same shape and dtype.
        src: The source, as a rank of the job. Default: 0.
        group: The process group. Default: all ranks of the job.

    Returns:
        A new tensor of the same shape.

    Raises:
        ConfigError: An argument is invalid, the process is outside the group, or it has not joined a job.
        CollectiveError: The ranks' calls do not match, or a rank does not make the call, in forward or backward.

    Example:
        >>> differentiable.broadcast(torch.ones(2), src=0)
        tensor([1., 1.])
    """
    checked = _require_member(group)
    source = checked.resolve_rank(src, None, "src")
    return _Broadcast.apply(tensor, source, checked)  # type: ignore[no-any-return,no-untyped-call]


def all_gather(tensor: Tensor, group: AnyGroup = None, lengths: Sequence[int] | None = None) -> Tensor:
    """Return the concatenation of all ranks' tensors along dim 0.

    Args:
        tensor: This rank's rows, of shape (rows, ...).
        group: The process group. Default: all ranks of the job.
        lengths: The rows of each rank, if they differ. Default: equal parts.

    Returns:
        A new tensor of shape (sum of the rows, ...).

    Raises:
        ConfigError: An argument is invalid, the process is outside the group, or it has not joined a job.
        CollectiveError: The ranks' calls do not match, or a rank does not make the call, in forward or backward.

    Example:
        >>> differentiable.all_gather(torch.ones(2, 1)).shape
        torch.Size([2, 1])
    """
    checked = _require_member(group)
    rows = _resolve_lengths(lengths, tensor.shape[0], checked)
    return _AllGather.apply(tensor, rows, checked)  # type: ignore[no-any-return,no-untyped-call]


def reduce_scatter(
    tensor: Tensor,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: AnyGroup = None,
    lengths: Sequence[int] | None = None,
) -> Tensor:
    """Return this rank's rows of the sum or the average of all ranks' tensors.

    Args:
        tensor: The rows of all ranks, of shape (sum of the rows, ...): one shape on all ranks.
        op: `ReduceOp.SUM` or `ReduceOp.AVG`, which are linear. Default: the sum.
        group: The process group. Default: all ranks of the job.
        lengths: The rows of each rank, if they differ. Default: equal parts.

    Returns:
        A new tensor of shape (rows of this rank, ...).

    Raises:
        ConfigError: An argument is invalid, `op` is not linear, the process is outside the group, or it has not
            joined a job.
        CollectiveError: The ranks' calls do not match, or a rank does not make the call, in forward or backward.

    Example:
        >>> differentiable.reduce_scatter(torch.ones(2, 1)).shape
        torch.Size([2, 1])
    """
    checked = _require_member(group)
    rows = _resolve_lengths(lengths, tensor.shape[0] // checked.size, checked)
    linear = _require_linear(op, "reduce_scatter")
    return _ReduceScatter.apply(tensor, rows, linear, checked)  # type: ignore[no-any-return,no-untyped-call]


def all_to_all(
    tensor: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: AnyGroup = None,
) -> Tensor:
    """Send the i-th part of `tensor` to rank i, and return what all ranks send here, concatenated along dim 0.

    Args:
        tensor: The parts for all ranks, of shape (rows, ...).
        output_split_sizes: The rows to receive from each rank. Default: equal parts.
        input_split_sizes: The rows to send to each rank. Default: equal parts.
        group: The process group. Default: all ranks of the job.

    Returns:
        A new tensor of shape (sum of `output_split_sizes`, ...).

    Raises:
        ConfigError: An argument is invalid, the process is outside the group, or it has not joined a job.
        CollectiveError: The ranks' calls do not match, or a rank does not make the call, in forward or backward.

    Example:
        >>> differentiable.all_to_all(torch.ones(2, 1)).shape
        torch.Size([2, 1])
    """
    checked = _require_member(group)
    send_shapes = _resolve_lengths(input_split_sizes, tensor.shape[0] // checked.size, checked)
    receive_shapes = _resolve_lengths(output_split_sizes, tensor.shape[0] // checked.size, checked)
    return _AllToAll.apply(tensor, receive_shapes, send_shapes, checked)  # type: ignore[no-any-return,no-untyped-call]


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, op: Any, checked: CheckedGroup) -> Tensor:
        ctx.op, ctx.checked = op, checked
        return _reduce_copy(tensor, op, checked)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _reduce_copy(gradients[0], ctx.op, ctx.checked), None, None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root: int, op: Any, checked: CheckedGroup) -> Tensor:
        ctx.root, ctx.op, ctx.checked = root, op, checked
        result = _contiguous_copy(tensor)
        reducing_collectives.reduce(result, op=op, group=checked.torch, group_dst=root)
        return result if checked.rank == root else torch.zeros_like(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        result = _contiguous_copy(gradients[0])
        data_movement.broadcast(result, group=ctx.checked.torch, group_src=ctx.root)
        return result / ctx.checked.size if ctx.op == ReduceOp.AVG else result, None, None, None


class _Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, source: int, checked: CheckedGroup) -> Tensor:
        ctx.source, ctx.checked = source, checked
        result = _contiguous_copy(tensor)
        data_movement.broadcast(result, group=checked.torch, group_src=source)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        result = _contiguous_copy(gradients[0])
        reducing_collectives.reduce(result, group=ctx.checked.torch, group_dst=ctx.source)
        return result if ctx.checked.rank == ctx.source else torch.zeros_like(result), None, None


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rows: list[int], checked: CheckedGroup) -> Tensor:
        ctx.rows, ctx.checked = rows, checked
        return _gather_rows(tensor, rows, checked)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _scatter_rows(gradients[0], ctx.rows, ReduceOp.SUM, ctx.checked), None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rows: list[int], op: Any, checked: CheckedGroup) -> Tensor:
        ctx.rows, ctx.op, ctx.checked = rows, op, checked
        return _scatter_rows(tensor, rows, op, checked)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        whole = _gather_rows(gradients[0], ctx.rows, ctx.checked)
        return whole / ctx.checked.size if ctx.op == ReduceOp.AVG else whole, None, None, None


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, receive_shapes: list[int], send_shapes: list[int], checked: CheckedGroup
    ) -> Tensor:
        ctx.receive_shapes, ctx.send_shapes, ctx.checked = receive_shapes, send_shapes, checked
        return _exchange_rows(tensor, receive_shapes, send_shapes, checked)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange_rows(gradients[0], ctx.send_shapes, ctx.receive_shapes, ctx.checked), None, None, None


def _reduce_copy(tensor: Tensor, op: Any, checked: CheckedGroup) -> Tensor:
    result = _contiguous_copy(tensor)
    reducing_collectives.all_reduce(result, op=op, group=checked.torch)
    return result


def _gather_rows(tensor: Tensor, rows: Sequence[int], checked: CheckedGroup) -> Tensor:
    pieces = [tensor.new_empty((length, *tensor.shape[1:])) for length in rows]
    data_movement.all_gather(pieces, _contiguous_copy(tensor), group=checked.torch)
    return torch.cat(pieces)


def _scatter_rows(tensor: Tensor, rows: Sequence[int], op: Any, checked: CheckedGroup) -> Tensor:
    result = tensor.new_empty((rows[checked.rank], *tensor.shape[1:]))
    reducing_collectives.reduce_scatter(result, tensor.contiguous().split(list(rows)), op=op, group=checked.torch)
    return result


def _exchange_rows(
    tensor: Tensor, receive_shapes: Sequence[int], send_shapes: Sequence[int], checked: CheckedGroup
) -> Tensor:
    result = tensor.new_empty((sum(receive_shapes), *tensor.shape[1:]))
    data_movement.all_to_all_single(result, tensor.contiguous(), receive_shapes, send_shapes, group=checked.torch)
    return result


def _contiguous_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _resolve_lengths(lengths: Sequence[int] | None, each: int, checked: CheckedGroup) -> list[int]:
    return [each] * checked.size if lengths is None else list(lengths)


def _require_linear(op: Any, name: str) -> Any:
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise ConfigError(
            expected=f"SUM or AVG in a differentiable {name}",
            found=str(op).rpartition(".")[2],
            fix="use the plain collective if you need no gradient",
        )
    return op


def _require_member(group: AnyGroup) -> CheckedGroup:
    checked = resolve_group(group)
    if checked is None:
        raise ConfigError(
            expected="a group that this process belongs to",
            found=f"a group without rank {dist.get_rank()}",
            fix="call it only on the ranks of the group",
        )
    return checked

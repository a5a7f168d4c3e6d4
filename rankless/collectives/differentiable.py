"""Collectives that autograd sees through: each returns a new tensor, and its backward is the transposed collective.

The gradient is that of the sum, over all ranks, of what each rank makes of its result: as if all ranks were one script.
Every rank must run the backward of each of them, in the same order.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ReduceOp

from rankless.collectives import data_movement, reductions
from rankless.collectives.process_groups import AnyGroup, Group, joined_group
from rankless.errors import ConfigError

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "reduce", "reduce_scatter"]


def all_reduce(tensor: Tensor, op: ReduceOp.RedOpType = ReduceOp.SUM, group: AnyGroup = None) -> Tensor:
    """The sum or average of all ranks' tensors."""
    joined = _member(group)
    return _AllReduce.apply(tensor, _linear(op, "all_reduce"), joined)  # type: ignore[no-any-return,no-untyped-call]


def reduce(tensor: Tensor, dst: int = 0, op: ReduceOp.RedOpType = ReduceOp.SUM, group: AnyGroup = None) -> Tensor:
    """The sum or average of all ranks' tensors on rank `dst`; zeros on the others."""
    joined = _member(group)
    place = joined.rank_of(dst, None, "dst")
    return _Reduce.apply(tensor, place, _linear(op, "reduce"), joined)  # type: ignore[no-any-return,no-untyped-call]


def broadcast(tensor: Tensor, src: int = 0, group: AnyGroup = None) -> Tensor:
    """Rank `src`'s tensor; the others' give the shape."""
    joined = _member(group)
    source = joined.rank_of(src, None, "src")
    return _Broadcast.apply(tensor, source, joined)  # type: ignore[no-any-return,no-untyped-call]


def all_gather(tensor: Tensor, group: AnyGroup = None, lengths: Sequence[int] | None = None) -> Tensor:
    """All ranks' tensors, concatenated in dim 0; `lengths` are every rank's rows where these differ."""
    joined = _member(group)
    rows = _lengths(lengths, tensor.shape[0], joined)
    return _AllGather.apply(tensor, rows, joined)  # type: ignore[no-any-return,no-untyped-call]


def reduce_scatter(
    tensor: Tensor,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: AnyGroup = None,
    lengths: Sequence[int] | None = None,
) -> Tensor:
    """This rank's rows of the sum or average of all ranks' tensors; `lengths` are every rank's where these differ."""
    joined = _member(group)
    rows = _lengths(lengths, tensor.shape[0] // joined.size, joined)
    linear = _linear(op, "reduce_scatter")
    return _ReduceScatter.apply(tensor, rows, linear, joined)  # type: ignore[no-any-return,no-untyped-call]


def all_to_all(
    tensor: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: AnyGroup = None,
) -> Tensor:
    """What all ranks send here, concatenated in dim 0: rank i sends its i-th part to rank i."""
    joined = _member(group)
    sends = _lengths(input_split_sizes, tensor.shape[0] // joined.size, joined)
    takes = _lengths(output_split_sizes, tensor.shape[0] // joined.size, joined)
    return _AllToAll.apply(tensor, takes, sends, joined)  # type: ignore[no-any-return,no-untyped-call]


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, op: Any, joined: Group) -> Tensor:
        ctx.op, ctx.joined = op, joined
        return _reduced(tensor, op, joined)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _reduced(gradients[0], ctx.op, ctx.joined), None, None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, place: int, op: Any, joined: Group) -> Tensor:
        ctx.place, ctx.op, ctx.joined = place, op, joined
        result = _own(tensor)
        reductions.reduce(result, op=op, group=joined.torch, group_dst=place)
        return result if joined.rank == place else torch.zeros_like(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        result = _own(gradients[0])
        data_movement.broadcast(result, group=ctx.joined.torch, group_src=ctx.place)
        return result / ctx.joined.size if ctx.op == ReduceOp.AVG else result, None, None, None


class _Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, source: int, joined: Group) -> Tensor:
        ctx.source, ctx.joined = source, joined
        result = _own(tensor)
        data_movement.broadcast(result, group=joined.torch, group_src=source)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        result = _own(gradients[0])
        reductions.reduce(result, group=ctx.joined.torch, group_dst=ctx.source)
        return result if ctx.joined.rank == ctx.source else torch.zeros_like(result), None, None


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rows: list[int], joined: Group) -> Tensor:
        ctx.rows, ctx.joined = rows, joined
        return _gathered(tensor, rows, joined)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _scattered(gradients[0], ctx.rows, ReduceOp.SUM, ctx.joined), None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rows: list[int], op: Any, joined: Group) -> Tensor:
        ctx.rows, ctx.op, ctx.joined = rows, op, joined
        return _scattered(tensor, rows, op, joined)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        whole = _gathered(gradients[0], ctx.rows, ctx.joined)
        return whole / ctx.joined.size if ctx.op == ReduceOp.AVG else whole, None, None, None


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, takes: list[int], sends: list[int], joined: Group) -> Tensor:
        ctx.takes, ctx.sends, ctx.joined = takes, sends, joined
        return _exchanged(tensor, takes, sends, joined)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(gradients[0], ctx.sends, ctx.takes, ctx.joined), None, None, None


def _reduced(tensor: Tensor, op: Any, joined: Group) -> Tensor:
    result = _own(tensor)
    reductions.all_reduce(result, op=op, group=joined.torch)
    return result


def _gathered(tensor: Tensor, rows: Sequence[int], joined: Group) -> Tensor:
    pieces = [tensor.new_empty((length, *tensor.shape[1:])) for length in rows]
    data_movement.all_gather(pieces, _own(tensor), group=joined.torch)
    return torch.cat(pieces)


def _scattered(tensor: Tensor, rows: Sequence[int], op: Any, joined: Group) -> Tensor:
    result = tensor.new_empty((rows[joined.rank], *tensor.shape[1:]))
    reductions.reduce_scatter(result, tensor.contiguous().split(list(rows)), op=op, group=joined.torch)
    return result


def _exchanged(tensor: Tensor, takes: Sequence[int], sends: Sequence[int], joined: Group) -> Tensor:
    result = tensor.new_empty((sum(takes), *tensor.shape[1:]))
    data_movement.all_to_all_single(result, tensor.contiguous(), takes, sends, group=joined.torch)
    return result


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _lengths(lengths: Sequence[int] | None, each: int, joined: Group) -> list[int]:
    return [each] * joined.size if lengths is None else list(lengths)


def _linear(op: Any, name: str) -> Any:
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise ConfigError(
            expected=f"SUM or AVG in a differentiable {name}",
            found=str(op).rpartition(".")[2],
            fix="use the plain collective where no gradient is needed",
        )
    return op


def _member(group: AnyGroup) -> Group:
    joined = joined_group(group)
    if joined is None:
        raise ConfigError(
            expected="a group to which this process belongs",
            found=f"one without rank {dist.get_rank()}",
            fix="call it on the group's ranks only",
        )
    return joined

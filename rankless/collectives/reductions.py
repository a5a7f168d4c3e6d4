"""Collectives that compute: all_reduce, reduce, reduce_scatter.

With torch.distributed's names and signatures, on its process groups, each after a roll call: where the ranks' calls do
not fit together, or one does not come, every rank raises `CollectiveError` that says who called what, in place of a
hang. Arguments are checked before anything is sent, and raise `ConfigError`; a process outside of the group gets None.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from rankless.collectives.argument_checks import (
    dtype_text,
    name_of,
    require_any,
    require_multiple,
    require_one_dtype,
    require_one_each,
    require_shape,
    require_usable,
    shapes_of,
    text_of,
)
from rankless.collectives.call_signature import Call
from rankless.collectives.checked_collectives import Awaited, finishing
from rankless.collectives.process_groups import AnyGroup, Group, joined_group
from rankless.collectives.tensor_collectives import joined_by_kind


def all_reduce(
    tensor: Tensor, op: ReduceOp.RedOpType = ReduceOp.SUM, group: AnyGroup = None, async_op: bool = False
) -> Awaited | None:
    """Overwrite `tensor` on every rank with the sum (or product, minimum, …) of all ranks' tensors."""
    joined = joined_group(group)
    if joined is None:
        return None
    with joined.telling("all_reduce"):
        require_usable(joined, tensor)
        call = Call(operation="all_reduce", settings=f"{name_of(op, tensor)}, {text_of(tensor)}")
    return joined.run(call, lambda late: dist.all_reduce(tensor, op=op, group=joined.torch, async_op=late), async_op)


def reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: AnyGroup = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Awaited | None:
    """Overwrite `tensor` on rank `dst` with the sum (or product, …) of all ranks'; theirs are undefined afterwards."""
    joined = joined_group(group)
    if joined is None:
        return None
    with joined.telling("reduce"):
        require_usable(joined, tensor)
        place = joined.rank_of(dst, group_dst, "dst")
        call = Call(operation="reduce", settings=f"{name_of(op, tensor)}, {text_of(tensor)}, to rank {place}")
    return joined.run(
        call,
        lambda late: dist.reduce(tensor, op=op, group=joined.torch, async_op=late, group_dst=place),
        async_op,
    )


def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: AnyGroup = None,
    async_op: bool = False,
) -> Awaited | None:
    """Overwrite rank i's `output` with the sum (or product, …) of all ranks' `input_list[i]`; shapes may differ."""
    joined = joined_group(group)
    if joined is None:
        return None
    with joined.telling("reduce_scatter"):
        require_usable(joined, output, *input_list)
        require_one_each(input_list, joined, "input_list")
        shapes = shapes_of(input_list)
        require_shape(output, shapes[joined.rank], f"output like input_list[{joined.rank}]")
        require_one_dtype(output, input_list)
        name = name_of(op, output)
    if all(shape == shapes[0] for shape in shapes):
        call = Call(operation="reduce_scatter", settings=f"{name}, {text_of(output)}")
        pieces = list(input_list)
        return joined.run(
            call,
            lambda late: dist.reduce_scatter(output, pieces, op=op, group=joined.torch, async_op=late),
            async_op,
        )
    settings = f"{name}, {dtype_text(output)}, shapes {[list(shape) for shape in shapes]}"
    call = Call(operation="reduce_scatter", settings=settings)
    return joined.run(call, partial(_issue_uneven_reduce_scatter, output, input_list, op, joined), async_op)


def _issue_uneven_reduce_scatter(
    output: Tensor, pieces: Sequence[Tensor], op: ReduceOp.RedOpType, joined: Group, late: bool
) -> Awaited | None:
    longest = max(piece.numel() for piece in pieces)
    padded = [output.new_zeros(longest) for _ in pieces]
    for place, piece in zip(padded, pieces, strict=True):
        place[: piece.numel()] = piece.detach().reshape(-1)
    result = torch.empty_like(padded[0])

    def finish() -> None:
        output.detach().copy_(result[: output.numel()].reshape(output.shape))

    return finishing([dist.reduce_scatter(result, padded, op=op, group=joined.torch, async_op=late)], finish, late)


def reduce_scatter_single(
    output: Tensor,
    input: Tensor,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: AnyGroup = None,
    async_op: bool = False,
) -> Awaited | None:
    """Overwrite rank i's `output` with the i-th part, along dim 0, of the sum (or product, …) of all ranks' `input`."""
    joined = joined_group(group)
    if joined is None:
        return None
    with joined.telling("reduce_scatter_single"):
        require_usable(joined, output, input)
        require_multiple(input, output, joined, "input")
        call = Call(operation="reduce_scatter_single", settings=f"{name_of(op, output)}, {text_of(output)}")
    return joined.run(
        call,
        lambda late: dist.reduce_scatter_single(output, input, op=op, group=joined.torch, async_op=late),
        async_op,
    )


def all_reduce_coalesced(
    tensors: Sequence[Tensor],
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: AnyGroup = None,
    async_op: bool = False,
) -> Awaited | None:
    """`all_reduce` of several tensors of one dtype as one."""
    joined = joined_group(group)
    if joined is None:
        return None
    with joined.telling("all_reduce_coalesced"):
        require_usable(joined, *tensors)
        kept = list(tensors)
        require_any(kept)
        require_one_dtype(kept[0], kept)
        shapes = [list(tensor.shape) for tensor in kept]
        settings = f"{name_of(op, kept[0])}, {dtype_text(kept[0])}, shapes {shapes}"

    def issue(late: bool) -> Awaited | None:
        ((flat, put_back),) = joined_by_kind(kept)
        return finishing([dist.all_reduce(flat, op=op, group=joined.torch, async_op=late)], put_back, late)

    return joined.run(Call(operation="all_reduce_coalesced", settings=settings), issue, async_op)

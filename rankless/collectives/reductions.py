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
    describe_tensor,
    dtype_name,
    reduction_name,
    require_any,
    require_multiple,
    require_one_dtype,
    require_one_each,
    require_shape,
    require_usable,
    shapes_of,
)
from rankless.collectives.call_signature import Call
from rankless.collectives.checked_collectives import PendingWork, combine_works
from rankless.collectives.process_groups import AnyGroup, CheckedGroup, resolve_group
from rankless.collectives.tensor_collectives import flatten_by_kind


def all_reduce(
    tensor: Tensor, op: ReduceOp.RedOpType = ReduceOp.SUM, group: AnyGroup = None, async_op: bool = False
) -> PendingWork | None:
    """Overwrite `tensor` on every rank with the sum (or product, minimum, …) of all ranks' tensors."""
    checked = resolve_group(group)
    if checked is None:
        return None
    with checked.report_refusals("all_reduce"):
        require_usable(checked, tensor)
        call = Call(operation="all_reduce", settings=f"{reduction_name(op, tensor)}, {describe_tensor(tensor)}")
    return checked.run(
        call, lambda async_op: dist.all_reduce(tensor, op=op, group=checked.torch, async_op=async_op), async_op
    )


def reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: AnyGroup = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> PendingWork | None:
    """Overwrite `tensor` on rank `dst` with the sum (or product, …) of all ranks'; theirs are undefined afterwards."""
    checked = resolve_group(group)
    if checked is None:
        return None
    with checked.report_refusals("reduce"):
        require_usable(checked, tensor)
        place = checked.resolve_rank(dst, group_dst, "dst")
        call = Call(
            operation="reduce", settings=f"{reduction_name(op, tensor)}, {describe_tensor(tensor)}, to rank {place}"
        )
    return checked.run(
        call,
        lambda async_op: dist.reduce(tensor, op=op, group=checked.torch, async_op=async_op, group_dst=place),
        async_op,
    )


def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: AnyGroup = None,
    async_op: bool = False,
) -> PendingWork | None:
    """Overwrite rank i's `output` with the sum (or product, …) of all ranks' `input_list[i]`; shapes may differ."""
    checked = resolve_group(group)
    if checked is None:
        return None
    with checked.report_refusals("reduce_scatter"):
        require_usable(checked, output, *input_list)
        require_one_each(input_list, checked, "input_list")
        shapes = shapes_of(input_list)
        require_shape(output, shapes[checked.rank], f"output like input_list[{checked.rank}]")
        require_one_dtype(output, input_list)
        name = reduction_name(op, output)
    if all(shape == shapes[0] for shape in shapes):
        call = Call(operation="reduce_scatter", settings=f"{name}, {describe_tensor(output)}")
        pieces = list(input_list)
        return checked.run(
            call,
            lambda async_op: dist.reduce_scatter(output, pieces, op=op, group=checked.torch, async_op=async_op),
            async_op,
        )
    settings = f"{name}, {dtype_name(output)}, shapes {[list(shape) for shape in shapes]}"
    call = Call(operation="reduce_scatter", settings=settings)
    return checked.run(call, partial(_issue_uneven_reduce_scatter, output, input_list, op, checked), async_op)


def _issue_uneven_reduce_scatter(
    output: Tensor, pieces: Sequence[Tensor], op: ReduceOp.RedOpType, checked: CheckedGroup, async_op: bool
) -> PendingWork | None:
    longest = max(piece.numel() for piece in pieces)
    padded = [output.new_zeros(longest) for _ in pieces]
    for place, piece in zip(padded, pieces, strict=True):
        place[: piece.numel()] = piece.detach().reshape(-1)
    result = torch.empty_like(padded[0])

    def finish() -> None:
        output.detach().copy_(result[: output.numel()].reshape(output.shape))

    return combine_works(
        [dist.reduce_scatter(result, padded, op=op, group=checked.torch, async_op=async_op)], finish, async_op
    )


def reduce_scatter_single(
    output: Tensor,
    input: Tensor,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: AnyGroup = None,
    async_op: bool = False,
) -> PendingWork | None:
    """Overwrite rank i's `output` with the i-th part, along dim 0, of the sum (or product, …) of all ranks' `input`."""
    checked = resolve_group(group)
    if checked is None:
        return None
    with checked.report_refusals("reduce_scatter_single"):
        require_usable(checked, output, input)
        require_multiple(input, output, checked, "input")
        call = Call(
            operation="reduce_scatter_single", settings=f"{reduction_name(op, output)}, {describe_tensor(output)}"
        )
    return checked.run(
        call,
        lambda async_op: dist.reduce_scatter_single(output, input, op=op, group=checked.torch, async_op=async_op),
        async_op,
    )


def all_reduce_coalesced(
    tensors: Sequence[Tensor],
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: AnyGroup = None,
    async_op: bool = False,
) -> PendingWork | None:
    """`all_reduce` of several tensors of one dtype as one."""
    checked = resolve_group(group)
    if checked is None:
        return None
    with checked.report_refusals("all_reduce_coalesced"):
        require_usable(checked, *tensors)
        kept = list(tensors)
        require_any(kept)
        require_one_dtype(kept[0], kept)
        shapes = [list(tensor.shape) for tensor in kept]
        settings = f"{reduction_name(op, kept[0])}, {dtype_name(kept[0])}, shapes {shapes}"

    def issue(async_op: bool) -> PendingWork | None:
        ((flat, copy_back),) = flatten_by_kind(kept)
        return combine_works(
            [dist.all_reduce(flat, op=op, group=checked.torch, async_op=async_op)], copy_back, async_op
        )

    return checked.run(Call(operation="all_reduce_coalesced", settings=settings), issue, async_op)

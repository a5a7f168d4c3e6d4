"""Collectives that compute: all_reduce, reduce, reduce_scatter.

They have the names, signatures and process groups of `torch.distributed`. Before each of them the ranks compare what
they are about to call. If the calls do not match, or if a rank does not make the call, every rank raises
`CollectiveError`, which names ranks, calls and lines, instead of hanging. Arguments are checked before anything is
sent and raise `ConfigError`. In a process outside the group the functions do nothing and return None.
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
    flatten,
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
from rankless.collectives.checked_collective_queue import PendingWork, combine_works
from rankless.collectives.checked_process_group import AnyGroup, CheckedGroup, resolve_group
from rankless.collectives.mesh_collectives import flatten_by_kind
from rankless.torch_versions import find_function


def all_reduce(
    tensor: Tensor, op: ReduceOp.RedOpType = ReduceOp.SUM, group: AnyGroup = None, async_op: bool = False
) -> PendingWork | None:
    """Overwrite `tensor` on every rank with the reduction, for example the sum, of all ranks' tensors.

    Args:
        tensor: This rank's input, and the result: one shape and one dtype on all ranks, contiguous.
        op: The reduction: `ReduceOp.SUM`, `AVG` (floats only), `PRODUCT`, `MIN`, `MAX`, `BAND`, `BOR`, `BXOR`.
        group: The process group. Default: all ranks of the job.
        async_op: Whether to return at once with work to wait for. Default: False.

    Returns:
        With `async_op=True` the work, with `wait(timeout)` and `is_completed()`. Otherwise None. In a process outside
        the group always None.

    Raises:
        ConfigError: An argument is invalid, or the process has not joined a job.
        CollectiveError: The ranks' calls do not match, or a rank does not make the call. Every rank raises; with
            `async_op=True` the work's `wait` raises.

    Example:
        >>> tensor = torch.ones(2)
        >>> collectives.all_reduce(tensor)
        >>> tensor
        tensor([1., 1.])
    """
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
    """Overwrite `tensor` on one rank with the reduction of all ranks' tensors. On the others it becomes undefined.

    Args:
        tensor: This rank's input, and the result on `dst`: one shape and one dtype on all ranks, contiguous.
        dst: The destination, as a rank of the job. Default: the group's first rank.
        op: The reduction: `ReduceOp.SUM`, `AVG` (floats only), `PRODUCT`, `MIN`, `MAX`, `BAND`, `BOR`, `BXOR`.
        group: The process group. Default: all ranks of the job.
        async_op: Whether to return at once with work to wait for. Default: False.
        group_dst: The destination, as a rank of the group, instead of `dst`.

    Returns:
        With `async_op=True` the work, with `wait(timeout)` and `is_completed()`. Otherwise None. In a process outside
        the group always None.

    Raises:
        ConfigError: An argument is invalid, or the process has not joined a job.
        CollectiveError: The ranks' calls do not match, or a rank does not make the call. Every rank raises; with
            `async_op=True` the work's `wait` raises.

    Example:
        >>> tensor = torch.ones(2)
        >>> collectives.reduce(tensor, dst=0)
        >>> tensor
        tensor([1., 1.])
    """
    checked = resolve_group(group)
    if checked is None:
        return None
    with checked.report_refusals("reduce"):
        require_usable(checked, tensor)
        root = checked.resolve_rank(dst, group_dst, "dst")
        call = Call(
            operation="reduce", settings=f"{reduction_name(op, tensor)}, {describe_tensor(tensor)}, to rank {root}"
        )
    return checked.run(
        call,
        lambda async_op: dist.reduce(tensor, op=op, group=checked.torch, async_op=async_op, group_dst=root),
        async_op,
    )


def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: AnyGroup = None,
    async_op: bool = False,
) -> PendingWork | None:
    """Overwrite rank i's `output` with the reduction of all ranks' `input_list[i]`. Shapes may differ between ranks.

    Args:
        output: Where to put this rank's result, contiguous.
        input_list: One contiguous tensor for each rank of the group, all of one dtype.
        op: The reduction: `ReduceOp.SUM`, `AVG` (floats only), `PRODUCT`, `MIN`, `MAX`, `BAND`, `BOR`, `BXOR`.
        group: The process group. Default: all ranks of the job.
        async_op: Whether to return at once with work to wait for. Default: False.

    Returns:
        With `async_op=True` the work, with `wait(timeout)` and `is_completed()`. Otherwise None. In a process outside
        the group always None.

    Raises:
        ConfigError: An argument is invalid, or the process has not joined a job.
        CollectiveError: The ranks' calls do not match, or a rank does not make the call. Every rank raises; with
            `async_op=True` the work's `wait` raises.

    Example:
        >>> result = torch.zeros(2)
        >>> collectives.reduce_scatter(result, [torch.ones(2)])
        >>> result
        tensor([1., 1.])
    """
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
    for padded_piece, piece in zip(padded, pieces, strict=True):
        padded_piece[: piece.numel()] = piece.detach().reshape(-1)
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
    """Overwrite rank i's `output` with the i-th part, along dim 0, of the reduction of all ranks' `input`.

    Args:
        output: Where to put this rank's part, contiguous.
        input: Contiguous, with as many elements as the outputs of all ranks together, of the same dtype.
        op: The reduction: `ReduceOp.SUM`, `AVG` (floats only), `PRODUCT`, `MIN`, `MAX`, `BAND`, `BOR`, `BXOR`.
        group: The process group. Default: all ranks of the job.
        async_op: Whether to return at once with work to wait for. Default: False.

    Returns:
        With `async_op=True` the work, with `wait(timeout)` and `is_completed()`. Otherwise None. In a process outside
        the group always None.

    Raises:
        ConfigError: An argument is invalid, or the process has not joined a job.
        CollectiveError: The ranks' calls do not match, or a rank does not make the call. Every rank raises; with
            `async_op=True` the work's `wait` raises.

    Example:
        >>> result = torch.zeros(2)
        >>> collectives.reduce_scatter_single(result, torch.ones(2))
        >>> result
        tensor([1., 1.])
    """
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
        lambda async_op: find_function(dist, "reduce_scatter_single")(
            flatten(output), flatten(input), op=op, group=checked.torch, async_op=async_op
        ),
        async_op,
    )


def all_reduce_coalesced(
    tensors: Sequence[Tensor],
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: AnyGroup = None,
    async_op: bool = False,
) -> PendingWork | None:
    """Reduce several tensors of one dtype in one operation, each as `all_reduce` does.

    Args:
        tensors: This rank's inputs, and the results, at least one: the same shapes on all ranks, contiguous.
        op: The reduction: `ReduceOp.SUM`, `AVG` (floats only), `PRODUCT`, `MIN`, `MAX`, `BAND`, `BOR`, `BXOR`.
        group: The process group. Default: all ranks of the job.
        async_op: Whether to return at once with work to wait for. Default: False.

    Returns:
        With `async_op=True` the work, with `wait(timeout)` and `is_completed()`. Otherwise None. In a process outside
        the group always None.

    Raises:
        ConfigError: An argument is invalid, or the process has not joined a job.
        CollectiveError: The ranks' calls do not match, or a rank does not make the call. Every rank raises; with
            `async_op=True` the work's `wait` raises.

    Example:
        >>> tensors = [torch.ones(2), torch.ones(1)]
        >>> collectives.all_reduce_coalesced(tensors)
        >>> tensors
        [tensor([1., 1.]), tensor([1.])]
    """
    checked = resolve_group(group)
    if checked is None:
        return None
    with checked.report_refusals("all_reduce_coalesced"):
        require_usable(checked, *tensors)
        inputs = list(tensors)
        require_any(inputs)
        require_one_dtype(inputs[0], inputs)
        shapes = [list(tensor.shape) for tensor in inputs]
        settings = f"{reduction_name(op, inputs[0])}, {dtype_name(inputs[0])}, shapes {shapes}"

    def issue(async_op: bool) -> PendingWork | None:
        ((flat, copy_back),) = flatten_by_kind(inputs)
        return combine_works(
            [dist.all_reduce(flat, op=op, group=checked.torch, async_op=async_op)], copy_back, async_op
        )

    return checked.run(Call(operation="all_reduce_coalesced", settings=settings), issue, async_op)

"""Collectives that move data: broadcast, gather, scatter, all_gather, all_to_all, and the barrier.

They have the names, signatures and process groups of `torch.distributed`. Before each of them the ranks compare what
they are about to call. If the calls do not match, or if a rank does not make the call, every rank raises
`CollectiveError`, which names ranks, calls and lines, instead of hanging. Arguments are checked before anything is
sent and raise `ConfigError`. In a process outside the group the functions do nothing and return None.
"""

from collections.abc import Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from rankless.collectives.argument_checks import (
    as_sendable,
    describe_tensor,
    dtype_name,
    flatten,
    require_any,
    require_list_on_root,
    require_multiple,
    require_one_dtype,
    require_one_each,
    require_shape,
    require_usable,
    shapes_of,
    split_shapes,
)
from rankless.collectives.call_signature import Call, Shape
from rankless.collectives.checked_collective_queue import Issue, PendingWork, combine_works
from rankless.collectives.checked_process_group import AnyGroup, CheckedGroup, resolve_group
from rankless.collectives.mesh_collectives import flatten_by_kind, is_copied
from rankless.errors import ConfigError
from rankless.torch_versions import find_function

_TAG = 0x52414E4B
"""The tag of messages with pieces of uneven sizes; an unusual number, so that no script uses it."""


def broadcast(
    tensor: Tensor, src: int | None = None, group: AnyGroup = None, async_op: bool = False, group_src: int | None = None
) -> PendingWork | None:
    """Overwrite `tensor` on every rank with the tensor of one rank.

    Args:
        tensor: The data on the source rank, and where to put it on the others: one shape and one dtype, contiguous.
        src: The source, as a rank of the job. Default: the group's first rank.
        group: The process group. Default: all ranks of the job.
        async_op: Whether to return at once with work to wait for. Default: False.
        group_src: The source, as a rank of the group, instead of `src`.

    Returns:
        With `async_op=True` the work, with `wait(timeout)` and `is_completed()`. Otherwise None. In a process outside
        the group always None.

    Raises:
        ConfigError: An argument is invalid, or the process has not joined a job.
        CollectiveError: The ranks' calls do not match, or a rank does not make the call. Every rank raises; with
            `async_op=True` the work's `wait` raises.

    Example:
        >>> tensor = torch.ones(2)
        >>> collectives.broadcast(tensor, src=0)
        >>> tensor
        tensor([1., 1.])
    """
    checked = resolve_group(group)
    if checked is None:
        return None
    with checked.report_refusals("broadcast"):
        require_usable(checked, tensor)
        source = checked.resolve_rank(src, group_src, "src")
        call = Call(operation="broadcast", settings=f"{describe_tensor(tensor)}, from rank {source}")
    return checked.run(
        call,
        lambda async_op: dist.broadcast(tensor, group=checked.torch, async_op=async_op, group_src=source),
        async_op,
    )


def all_gather(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: AnyGroup = None, async_op: bool = False
) -> PendingWork | None:
    """Fill `tensor_list[i]` on every rank with rank i's `tensor`. Shapes may differ between ranks.

    Args:
        tensor_list: One contiguous tensor for each rank of the group, of the shape and dtype of that rank's `tensor`.
        tensor: This rank's tensor, contiguous.
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
        >>> gathered = [torch.zeros(2)]
        >>> collectives.all_gather(gathered, torch.ones(2))
        >>> gathered
        [tensor([1., 1.])]
    """
    checked = resolve_group(group)
    if checked is None:
        return None
    with checked.report_refusals("all_gather"):
        require_usable(checked, tensor, *tensor_list)
        require_one_each(tensor_list, checked, "tensor_list")
        shapes = shapes_of(tensor_list)
        require_shape(tensor, shapes[checked.rank], f"tensor like tensor_list[{checked.rank}]")
        require_one_dtype(tensor, tensor_list)
    if all(shape == shapes[0] for shape in shapes):
        call = Call(operation="all_gather", settings=describe_tensor(tensor))
        pieces = list(tensor_list)
        return checked.run(
            call, lambda async_op: dist.all_gather(pieces, tensor, group=checked.torch, async_op=async_op), async_op
        )
    settings = f"{dtype_name(tensor)}, shapes {[list(shape) for shape in shapes]}"
    call = Call(operation="all_gather", settings=settings)
    return checked.run(call, partial(_issue_uneven_all_gather, tensor_list, tensor, checked), async_op)


def _issue_uneven_all_gather(
    into: Sequence[Tensor], tensor: Tensor, checked: CheckedGroup, async_op: bool
) -> PendingWork | None:
    # Backends take equal pieces only.
    longest = max(item.numel() for item in into)
    padded = tensor.new_zeros(longest)
    padded[: tensor.numel()] = tensor.detach().reshape(-1)
    pieces = [torch.empty_like(padded) for _ in into]

    def finish() -> None:
        for target, piece in zip(into, pieces, strict=True):
            target.detach().copy_(piece[: target.numel()].reshape(target.shape))

    return combine_works([dist.all_gather(pieces, padded, group=checked.torch, async_op=async_op)], finish, async_op)


def all_gather_coalesced(
    output_tensor_lists: Sequence[Sequence[Tensor]],
    input_tensor_list: Sequence[Tensor],
    group: AnyGroup = None,
    async_op: bool = False,
) -> PendingWork | None:
    """Gather several tensors of one dtype in one operation: fill `output_tensor_lists[i]` with rank i's tensors.

    Args:
        output_tensor_lists: One list for each rank of the group, of tensors of the shapes of that rank's inputs.
        input_tensor_list: This rank's tensors, at least one, contiguous and of one dtype.
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
        >>> gathered = [[torch.zeros(2), torch.zeros(1)]]
        >>> collectives.all_gather_coalesced(gathered, [torch.ones(2), torch.ones(1)])
        >>> gathered
        [[tensor([1., 1.]), tensor([1.])]]
    """
    checked = resolve_group(group)
    if checked is None:
        return None
    with checked.report_refusals("all_gather_coalesced"):
        tensors, lists = list(input_tensor_list), [list(tensors) for tensors in output_tensor_lists]
        targets = [target for into in lists for target in into]
        require_usable(checked, *tensors, *targets)
        require_one_each(lists, checked, "output_tensor_lists")
        require_any(tensors)
        require_one_dtype(tensors[0], [*tensors, *targets])
        shapes = [[list(target.shape) for target in into] for into in lists]
        if shapes[checked.rank] != (own_shapes := [list(tensor.shape) for tensor in tensors]):
            raise ConfigError(
                expected=f"output_tensor_lists[{checked.rank}] with the shapes of this rank's inputs, {own_shapes}",
                found=f"{shapes[checked.rank]}",
                fix="give both the same shapes",
            )
        # Usually all ranks have the same shapes, and one list describes them.
        described = (
            f"shapes {own_shapes}" if all(other == own_shapes for other in shapes) else f"shapes by rank {shapes}"
        )
        call = Call(operation="all_gather_coalesced", settings=f"{dtype_name(tensors[0])}, {described}")
    return checked.run(call, partial(_issue_all_gather_coalesced, lists, tensors, checked), async_op)


def _issue_all_gather_coalesced(
    into: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], checked: CheckedGroup, async_op: bool
) -> PendingWork | None:
    ((flat, _),) = flatten_by_kind(tensors)
    pieces = [flat.new_empty(sum(target.numel() for target in targets)) for targets in into]

    def finish() -> None:
        for targets, piece in zip(into, pieces, strict=True):
            for target, part in zip(targets, piece.split([target.numel() for target in targets]), strict=True):
                target.detach().copy_(part.reshape(target.shape))

    if all(piece.numel() == flat.numel() for piece in pieces):
        return combine_works([dist.all_gather(pieces, flat, group=checked.torch, async_op=async_op)], finish, async_op)
    work = _issue_uneven_all_gather(pieces, flat, checked, async_op)
    return combine_works([work], finish, async_op)


def all_gather_single(
    output_tensor: Tensor, input_tensor: Tensor, group: AnyGroup = None, async_op: bool = False
) -> PendingWork | None:
    """Fill `output_tensor` on every rank with the `input_tensor` of all ranks, in the order of ranks.

    Args:
        output_tensor: Contiguous, with as many elements as the inputs of all ranks together: their concatenation or
            their stack along dim 0.
        input_tensor: This rank's tensor, contiguous: one shape and one dtype on all ranks.
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
        >>> gathered = torch.zeros(1, 2)
        >>> collectives.all_gather_single(gathered, torch.ones(2))
        >>> gathered
        tensor([[1., 1.]])
    """
    checked = resolve_group(group)
    if checked is None:
        return None
    with checked.report_refusals("all_gather_single"):
        require_usable(checked, output_tensor, input_tensor)
        require_multiple(output_tensor, input_tensor, checked, "output_tensor")
        call = Call(operation="all_gather_single", settings=describe_tensor(input_tensor))
    return checked.run(
        call,
        lambda async_op: find_function(dist, "all_gather_single")(
            flatten(output_tensor), flatten(input_tensor), group=checked.torch, async_op=async_op
        ),
        async_op,
    )


def gather(
    tensor: Tensor,
    gather_list: Sequence[Tensor] | None = None,
    dst: int | None = None,
    group: AnyGroup = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> PendingWork | None:
    """Fill `gather_list[i]` on one rank with rank i's `tensor`. Shapes may differ between ranks.

    Args:
        tensor: This rank's tensor, contiguous.
        gather_list: On the destination one contiguous tensor for each rank of the group; None on the other ranks.
        dst: The destination, as a rank of the job. Default: the group's first rank.
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
        >>> gathered = [torch.zeros(2)]
        >>> collectives.gather(torch.ones(2), gathered, dst=0)
        >>> gathered
        [tensor([1., 1.])]
    """
    checked = resolve_group(group)
    if checked is None:
        return None
    with checked.report_refusals("gather"):
        require_usable(checked, tensor, *(gather_list or ()))
        target = checked.resolve_rank(dst, group_dst, "dst")
        require_list_on_root(gather_list, target, checked, "gather_list", "dst")
        receive_shapes = None
        if gather_list is not None:
            require_one_each(gather_list, checked, "gather_list")
            require_one_dtype(tensor, gather_list)
            receive_shapes = shapes_of(gather_list)
        call = Call(
            operation="gather",
            settings=f"{dtype_name(tensor)}, to rank {target}",
            send_shapes=_only(target, tuple(tensor.shape), checked),
            receive_shapes=receive_shapes or (None,) * checked.size,
        )
    outgoing = {target: tensor}
    incoming = {} if gather_list is None else dict(enumerate(gather_list))
    return checked.run(call, partial(_exchange, outgoing, incoming, checked), async_op)


def scatter(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = None,
    src: int | None = None,
    group: AnyGroup = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> PendingWork | None:
    """Overwrite rank i's `tensor` with `scatter_list[i]` of one rank. Shapes may differ between ranks.

    Args:
        tensor: Where to put this rank's part, contiguous.
        scatter_list: On the source one contiguous tensor for each rank of the group; None on the other ranks.
        src: The source, as a rank of the job. Default: the group's first rank.
        group: The process group. Default: all ranks of the job.
        async_op: Whether to return at once with work to wait for. Default: False.
        group_src: The source, as a rank of the group, instead of `src`.

    Returns:
        With `async_op=True` the work, with `wait(timeout)` and `is_completed()`. Otherwise None. In a process outside
        the group always None.

    Raises:
        ConfigError: An argument is invalid, or the process has not joined a job.
        CollectiveError: The ranks' calls do not match, or a rank does not make the call. Every rank raises; with
            `async_op=True` the work's `wait` raises.

    Example:
        >>> part = torch.zeros(2)
        >>> collectives.scatter(part, [torch.ones(2)], src=0)
        >>> part
        tensor([1., 1.])
    """
    checked = resolve_group(group)
    if checked is None:
        return None
    with checked.report_refusals("scatter"):
        require_usable(checked, tensor, *(scatter_list or ()))
        source = checked.resolve_rank(src, group_src, "src")
        require_list_on_root(scatter_list, source, checked, "scatter_list", "src")
        send_shapes = None
        if scatter_list is not None:
            require_one_each(scatter_list, checked, "scatter_list")
            require_one_dtype(tensor, scatter_list)
            send_shapes = shapes_of(scatter_list)
        call = Call(
            operation="scatter",
            settings=f"{dtype_name(tensor)}, from rank {source}",
            send_shapes=send_shapes or (None,) * checked.size,
            receive_shapes=_only(source, tuple(tensor.shape), checked),
        )
    outgoing = {} if scatter_list is None else dict(enumerate(scatter_list))
    return checked.run(call, partial(_exchange, outgoing, {source: tensor}, checked), async_op)


def _exchange(
    outgoing: dict[int, Tensor], incoming: dict[int, Tensor], checked: CheckedGroup, async_op: bool
) -> PendingWork | None:
    """Send and receive pieces of any size, and copy this rank's own."""
    operations, copies = [], []
    for peer, tensor in outgoing.items():
        if peer == checked.rank:
            incoming[peer].detach().copy_(tensor.detach())
        elif tensor.numel():
            data = as_sendable(tensor.detach().contiguous())
            data = data.cpu() if is_copied(data, checked.torch) else data
            operations.append(dist.P2POp(dist.isend, data, group=checked.torch, group_peer=peer, tag=_TAG))
    for peer, tensor in incoming.items():
        if peer != checked.rank and tensor.numel():
            device = torch.device("cpu") if is_copied(tensor, checked.torch) else tensor.device
            target = tensor.detach()
            if device != tensor.device or not tensor.is_contiguous():
                target = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            copies.append((tensor, target))
            operations.append(
                dist.P2POp(dist.irecv, as_sendable(target), group=checked.torch, group_peer=peer, tag=_TAG)
            )
    works = dist.batch_isend_irecv(operations) if operations else []

    def finish() -> None:
        for tensor, target in copies:
            if target.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(target)

    return combine_works(works, finish, async_op)


def all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: AnyGroup = None,
    async_op: bool = False,
) -> PendingWork | None:
    """Fill `output_tensor_list[i]` with the tensor that rank i sends to this rank. All shapes may differ.

    Args:
        output_tensor_list: One contiguous tensor for each rank of the group: what to receive from rank i.
        input_tensor_list: One contiguous tensor for each rank of the group: what to send to rank i. All of one dtype.
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
        >>> received = [torch.zeros(2)]
        >>> collectives.all_to_all(received, [torch.ones(2)])
        >>> received
        [tensor([1., 1.])]
    """
    checked = resolve_group(group)
    if checked is None:
        return None
    with checked.report_refusals("all_to_all"):
        require_usable(checked, *input_tensor_list, *output_tensor_list)
        require_one_each(output_tensor_list, checked, "output_tensor_list")
        require_one_each(input_tensor_list, checked, "input_tensor_list")
        require_one_dtype(input_tensor_list[0], [*output_tensor_list, *input_tensor_list])
        call = Call(
            operation="all_to_all",
            settings=dtype_name(input_tensor_list[0]),
            send_shapes=shapes_of(input_tensor_list),
            receive_shapes=shapes_of(output_tensor_list),
        )
        outgoing, incoming = dict(enumerate(input_tensor_list)), dict(enumerate(output_tensor_list))
        require_shape(
            incoming[checked.rank],
            tuple(outgoing[checked.rank].shape),
            "output_tensor_list with the shape of this rank's own input",
        )
    return checked.run(call, partial(_exchange, outgoing, incoming, checked), async_op)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: AnyGroup = None,
    async_op: bool = False,
) -> PendingWork | None:
    """Send the i-th part of `input` to rank i, and receive rank i's part into the i-th part of `output`, along dim 0.

    Args:
        output: Where to put the parts of all ranks, contiguous.
        input: The parts for all ranks, contiguous, of the same dtype.
        output_split_sizes: The rows to receive from each rank. Default: equal parts.
        input_split_sizes: The rows to send to each rank. Default: equal parts.
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
        >>> received = torch.zeros(2)
        >>> collectives.all_to_all_single(received, torch.ones(2))
        >>> received
        tensor([1., 1.])
    """
    checked = resolve_group(group)
    if checked is None:
        return None
    with checked.report_refusals("all_to_all_single"):
        require_usable(checked, output, input)
        require_one_dtype(input, [output])
        send_shapes = split_shapes(input, input_split_sizes, checked, "input")
        receive_shapes = split_shapes(output, output_split_sizes, checked, "output")
        call = Call(
            operation="all_to_all_single",
            settings=dtype_name(input),
            send_shapes=send_shapes,
            receive_shapes=receive_shapes,
        )
    into = None if output_split_sizes is None else list(output_split_sizes)
    out_of = None if input_split_sizes is None else list(input_split_sizes)
    return checked.run(
        call,
        lambda async_op: dist.all_to_all_single(output, input, into, out_of, group=checked.torch, async_op=async_op),
        async_op,
    )


def barrier(
    group: AnyGroup = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: timedelta | None = None,
) -> PendingWork | None:
    """Return when every rank of the group has made the call.

    Args:
        group: The process group. Default: all ranks of the job.
        async_op: Whether to return at once with work to wait for. Default: False.
        device_ids: The GPU to use with NCCL, as a list of one number. Default: NCCL's choice.
        timeout: How long to wait, a `datetime.timedelta`. Default: the group's timeout.

    Returns:
        With `async_op=True` the work, with `wait(timeout)` and `is_completed()`. Otherwise None. In a process outside
        the group always None.

    Raises:
        ConfigError: An argument is invalid, or the process has not joined a job.
        CollectiveError: The ranks' calls do not match, or a rank does not make the call. Every rank raises; with
            `async_op=True` the work's `wait` raises.

    Example:
        >>> collectives.barrier()
    """
    checked = resolve_group(group)
    if checked is None:
        return None
    devices = None if device_ids is None else list(device_ids)
    issue: Issue = lambda async_op: dist.barrier(group=checked.torch, async_op=async_op, device_ids=devices)  # noqa: E731
    return checked.run(Call(operation="barrier", settings=""), issue, async_op, timeout)


def _only(target: int, shape: Shape, checked: CheckedGroup) -> tuple[Shape | None, ...]:
    """Return a shape for one rank, and None for the others."""
    return tuple(shape if rank == target else None for rank in range(checked.size))

"""Collectives that move: broadcast, gather, scatter, all_gather, all_to_all; and the barrier.

With torch.distributed's names and signatures, on its process groups, each after a roll call: where the ranks' calls do
not fit together, or one does not come, every rank raises `CollectiveError` that says who called what, in place of a
hang. Arguments are checked before anything is sent, and raise `ConfigError`; a process outside of the group gets None.
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
from rankless.collectives.checked_collectives import Issue, PendingWork, combine_works
from rankless.collectives.process_groups import AnyGroup, CheckedGroup, resolve_group
from rankless.collectives.tensor_collectives import flatten_by_kind
from rankless.errors import ConfigError

_TAG = 0x52414E4B
"""Of the messages in which pieces of uneven sizes travel; no script will use it."""


def broadcast(
    tensor: Tensor, src: int | None = None, group: AnyGroup = None, async_op: bool = False, group_src: int | None = None
) -> PendingWork | None:
    """Overwrite `tensor` on every rank with that of rank `src` (of the job) or `group_src` (of the group)."""
    checked = resolve_group(group)
    if checked is None:
        return None
    with checked.report_refusals("broadcast"):
        require_usable(checked, tensor)
        source = checked.resolve_rank(src, group_src, "src")
        call = Call(operation="broadcast", settings=f"{describe_tensor(tensor)}, from rank {source}")
    issue = partial(_issue_broadcast, tensor, source, checked)
    return checked.run(call, issue, async_op)


def _issue_broadcast(tensor: Tensor, source: int, checked: CheckedGroup, async_op: bool) -> PendingWork | None:
    work: PendingWork | None = dist.broadcast(tensor, group=checked.torch, async_op=async_op, group_src=source)
    return work


def all_gather(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: AnyGroup = None, async_op: bool = False
) -> PendingWork | None:
    """Fill `tensor_list[i]` on every rank with rank i's `tensor`; shapes may differ by rank."""
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
        for place, piece in zip(into, pieces, strict=True):
            place.detach().copy_(piece[: place.numel()].reshape(place.shape))

    return combine_works([dist.all_gather(pieces, padded, group=checked.torch, async_op=async_op)], finish, async_op)


def all_gather_coalesced(
    output_tensor_lists: Sequence[Sequence[Tensor]],
    input_tensor_list: Sequence[Tensor],
    group: AnyGroup = None,
    async_op: bool = False,
) -> PendingWork | None:
    """`all_gather` of several tensors of one dtype as one: fill `output_tensor_lists[i]` with rank i's tensors."""
    checked = resolve_group(group)
    if checked is None:
        return None
    with checked.report_refusals("all_gather_coalesced"):
        tensors, lists = list(input_tensor_list), [list(tensors) for tensors in output_tensor_lists]
        places = [place for into in lists for place in into]
        require_usable(checked, *tensors, *places)
        require_one_each(lists, checked, "output_tensor_lists")
        require_any(tensors)
        require_one_dtype(tensors[0], [*tensors, *places])
        shapes = [[list(place.shape) for place in into] for into in lists]
        if shapes[checked.rank] != (mine := [list(tensor.shape) for tensor in tensors]):
            raise ConfigError(
                expected=f"output_tensor_lists[{checked.rank}] with room for this rank's own, of shapes {mine}",
                found=f"{shapes[checked.rank]}",
                fix="let both have the same shapes: that is what this rank gives",
            )
        # Where all ranks give alike, as is the rule, one list says it all.
        described = f"shapes {mine}" if all(alike == mine for alike in shapes) else f"shapes by rank {shapes}"
        call = Call(operation="all_gather_coalesced", settings=f"{dtype_name(tensors[0])}, {described}")
    return checked.run(call, partial(_issue_all_gather_coalesced, lists, tensors, checked), async_op)


def _issue_all_gather_coalesced(
    into: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], checked: CheckedGroup, async_op: bool
) -> PendingWork | None:
    ((flat, _),) = flatten_by_kind(tensors)
    pieces = [flat.new_empty(sum(place.numel() for place in places)) for places in into]

    def finish() -> None:
        for places, piece in zip(into, pieces, strict=True):
            for place, part in zip(places, piece.split([place.numel() for place in places]), strict=True):
                place.detach().copy_(part.reshape(place.shape))

    if all(piece.numel() == flat.numel() for piece in pieces):
        return combine_works([dist.all_gather(pieces, flat, group=checked.torch, async_op=async_op)], finish, async_op)
    work = _issue_uneven_all_gather(pieces, flat, checked, async_op)
    return combine_works([work], finish, async_op)


def all_gather_single(
    output_tensor: Tensor, input_tensor: Tensor, group: AnyGroup = None, async_op: bool = False
) -> PendingWork | None:
    """Fill `output_tensor` on every rank with all ranks' `input_tensor`s, concatenated or stacked in dim 0."""
    checked = resolve_group(group)
    if checked is None:
        return None
    with checked.report_refusals("all_gather_single"):
        require_usable(checked, output_tensor, input_tensor)
        require_multiple(output_tensor, input_tensor, checked, "output_tensor")
        call = Call(operation="all_gather_single", settings=describe_tensor(input_tensor))
    return checked.run(
        call,
        lambda async_op: dist.all_gather_single(output_tensor, input_tensor, group=checked.torch, async_op=async_op),
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
    """Fill `gather_list[i]` on rank `dst` with rank i's `tensor`; shapes may differ by rank."""
    checked = resolve_group(group)
    if checked is None:
        return None
    with checked.report_refusals("gather"):
        require_usable(checked, tensor, *(gather_list or ()))
        place = checked.resolve_rank(dst, group_dst, "dst")
        require_list_on_root(gather_list, place, checked, "gather_list", "dst")
        receive_shapes = None
        if gather_list is not None:
            require_one_each(gather_list, checked, "gather_list")
            require_one_dtype(tensor, gather_list)
            receive_shapes = shapes_of(gather_list)
        call = Call(
            operation="gather",
            settings=f"{dtype_name(tensor)}, to rank {place}",
            send_shapes=_only(place, tuple(tensor.shape), checked),
            receive_shapes=receive_shapes or (None,) * checked.size,
        )
    sent = {place: tensor}
    taken = {} if gather_list is None else dict(enumerate(gather_list))
    return checked.run(call, partial(_exchange, sent, taken, checked), async_op)


def scatter(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = None,
    src: int | None = None,
    group: AnyGroup = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> PendingWork | None:
    """Overwrite rank i's `tensor` with `scatter_list[i]` of rank `src`; shapes may differ by rank."""
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
    sent = {} if scatter_list is None else dict(enumerate(scatter_list))
    return checked.run(call, partial(_exchange, sent, {source: tensor}, checked), async_op)


def _exchange(
    sent: dict[int, Tensor], taken: dict[int, Tensor], checked: CheckedGroup, async_op: bool
) -> PendingWork | None:
    """Send and take pieces of any size; what is one's own is copied."""
    operations, copies = [], []
    for peer, tensor in sent.items():
        if peer == checked.rank:
            taken[peer].detach().copy_(tensor.detach())
        elif tensor.numel():
            data = as_sendable(tensor.detach().contiguous())
            operations.append(dist.P2POp(dist.isend, data, group=checked.torch, group_peer=peer, tag=_TAG))
    for peer, tensor in taken.items():
        if peer != checked.rank and tensor.numel():
            place = tensor.detach() if tensor.is_contiguous() else torch.empty_like(tensor).contiguous()
            copies.append((tensor, place))
            operations.append(
                dist.P2POp(dist.irecv, as_sendable(place), group=checked.torch, group_peer=peer, tag=_TAG)
            )
    works = dist.batch_isend_irecv(operations) if operations else []

    def finish() -> None:
        for tensor, place in copies:
            if place.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(place)

    return combine_works(works, finish, async_op)


def all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: AnyGroup = None,
    async_op: bool = False,
) -> PendingWork | None:
    """Fill `output_tensor_list[i]` with rank i's `input_tensor_list[own rank]`; shapes may all differ."""
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
        sent, taken = dict(enumerate(input_tensor_list)), dict(enumerate(output_tensor_list))
        require_shape(taken[checked.rank], tuple(sent[checked.rank].shape), "output_tensor_list with room for its own")
    return checked.run(call, partial(_exchange, sent, taken, checked), async_op)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: AnyGroup = None,
    async_op: bool = False,
) -> PendingWork | None:
    """Send the i-th part of `input`, along dim 0, to rank i, and put what rank i sends into the i-th part of `output`.

    Parts are equal unless split sizes say otherwise.
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
    """Return once every rank has come here; after `timeout` (the group's) raises CollectiveError naming who has not."""
    checked = resolve_group(group)
    if checked is None:
        return None
    devices = None if device_ids is None else list(device_ids)
    issue: Issue = lambda async_op: dist.barrier(group=checked.torch, async_op=async_op, device_ids=devices)  # noqa: E731
    return checked.run(Call(operation="barrier", settings=""), issue, async_op, timeout)


def _only(place: int, shape: Shape, checked: CheckedGroup) -> tuple[Shape | None, ...]:
    """A shape for one rank, and nothing for the others."""
    return tuple(shape if rank == place else None for rank in range(checked.size))

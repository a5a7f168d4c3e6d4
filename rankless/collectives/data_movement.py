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
    dtype_text,
    movable,
    require_any,
    require_list_at,
    require_multiple,
    require_one_dtype,
    require_one_each,
    require_shape,
    require_usable,
    shapes_of,
    split_shapes,
    text_of,
)
from rankless.collectives.call_signature import Call, Shape
from rankless.collectives.checked_collectives import Awaited, Issue, finishing
from rankless.collectives.process_groups import AnyGroup, Group, joined_group
from rankless.collectives.tensor_collectives import joined_by_kind
from rankless.errors import ConfigError

_TAG = 0x52414E4B
"""Of the messages in which pieces of uneven sizes travel; no script will use it."""


def broadcast(
    tensor: Tensor, src: int | None = None, group: AnyGroup = None, async_op: bool = False, group_src: int | None = None
) -> Awaited | None:
    """Overwrite `tensor` on every rank with that of rank `src` (of the job) or `group_src` (of the group)."""
    joined = joined_group(group)
    if joined is None:
        return None
    with joined.telling("broadcast"):
        require_usable(joined, tensor)
        source = joined.rank_of(src, group_src, "src")
        call = Call(operation="broadcast", settings=f"{text_of(tensor)}, from rank {source}")
    issue = partial(_issue_broadcast, tensor, source, joined)
    return joined.run(call, issue, async_op)


def _issue_broadcast(tensor: Tensor, source: int, joined: Group, late: bool) -> Awaited | None:
    work: Awaited | None = dist.broadcast(tensor, group=joined.torch, async_op=late, group_src=source)
    return work


def all_gather(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: AnyGroup = None, async_op: bool = False
) -> Awaited | None:
    """Fill `tensor_list[i]` on every rank with rank i's `tensor`; shapes may differ by rank."""
    joined = joined_group(group)
    if joined is None:
        return None
    with joined.telling("all_gather"):
        require_usable(joined, tensor, *tensor_list)
        require_one_each(tensor_list, joined, "tensor_list")
        shapes = shapes_of(tensor_list)
        require_shape(tensor, shapes[joined.rank], f"tensor like tensor_list[{joined.rank}]")
        require_one_dtype(tensor, tensor_list)
    if all(shape == shapes[0] for shape in shapes):
        call = Call(operation="all_gather", settings=text_of(tensor))
        pieces = list(tensor_list)
        return joined.run(
            call, lambda late: dist.all_gather(pieces, tensor, group=joined.torch, async_op=late), async_op
        )
    settings = f"{dtype_text(tensor)}, shapes {[list(shape) for shape in shapes]}"
    call = Call(operation="all_gather", settings=settings)
    return joined.run(call, partial(_issue_uneven_all_gather, tensor_list, tensor, joined), async_op)


def _issue_uneven_all_gather(into: Sequence[Tensor], tensor: Tensor, joined: Group, late: bool) -> Awaited | None:
    # Backends take equal pieces only.
    longest = max(item.numel() for item in into)
    padded = tensor.new_zeros(longest)
    padded[: tensor.numel()] = tensor.detach().reshape(-1)
    pieces = [torch.empty_like(padded) for _ in into]

    def finish() -> None:
        for place, piece in zip(into, pieces, strict=True):
            place.detach().copy_(piece[: place.numel()].reshape(place.shape))

    return finishing([dist.all_gather(pieces, padded, group=joined.torch, async_op=late)], finish, late)


def all_gather_coalesced(
    output_tensor_lists: Sequence[Sequence[Tensor]],
    input_tensor_list: Sequence[Tensor],
    group: AnyGroup = None,
    async_op: bool = False,
) -> Awaited | None:
    """`all_gather` of several tensors of one dtype as one: fill `output_tensor_lists[i]` with rank i's tensors."""
    joined = joined_group(group)
    if joined is None:
        return None
    with joined.telling("all_gather_coalesced"):
        tensors, lists = list(input_tensor_list), [list(tensors) for tensors in output_tensor_lists]
        places = [place for into in lists for place in into]
        require_usable(joined, *tensors, *places)
        require_one_each(lists, joined, "output_tensor_lists")
        require_any(tensors)
        require_one_dtype(tensors[0], [*tensors, *places])
        shapes = [[list(place.shape) for place in into] for into in lists]
        if shapes[joined.rank] != (mine := [list(tensor.shape) for tensor in tensors]):
            raise ConfigError(
                expected=f"output_tensor_lists[{joined.rank}] with room for this rank's own, of shapes {mine}",
                found=f"{shapes[joined.rank]}",
                fix="let both have the same shapes: that is what this rank gives",
            )
        # Where all ranks give alike, as is the rule, one list says it all.
        told = f"shapes {mine}" if all(alike == mine for alike in shapes) else f"shapes by rank {shapes}"
        call = Call(operation="all_gather_coalesced", settings=f"{dtype_text(tensors[0])}, {told}")
    return joined.run(call, partial(_issue_all_gather_coalesced, lists, tensors, joined), async_op)


def _issue_all_gather_coalesced(
    into: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], joined: Group, late: bool
) -> Awaited | None:
    ((flat, _),) = joined_by_kind(tensors)
    pieces = [flat.new_empty(sum(place.numel() for place in places)) for places in into]

    def finish() -> None:
        for places, piece in zip(into, pieces, strict=True):
            for place, part in zip(places, piece.split([place.numel() for place in places]), strict=True):
                place.detach().copy_(part.reshape(place.shape))

    if all(piece.numel() == flat.numel() for piece in pieces):
        return finishing([dist.all_gather(pieces, flat, group=joined.torch, async_op=late)], finish, late)
    work = _issue_uneven_all_gather(pieces, flat, joined, late)
    return finishing([work], finish, late)


def all_gather_single(
    output_tensor: Tensor, input_tensor: Tensor, group: AnyGroup = None, async_op: bool = False
) -> Awaited | None:
    """Fill `output_tensor` on every rank with all ranks' `input_tensor`s, concatenated or stacked in dim 0."""
    joined = joined_group(group)
    if joined is None:
        return None
    with joined.telling("all_gather_single"):
        require_usable(joined, output_tensor, input_tensor)
        require_multiple(output_tensor, input_tensor, joined, "output_tensor")
        call = Call(operation="all_gather_single", settings=text_of(input_tensor))
    return joined.run(
        call,
        lambda late: dist.all_gather_single(output_tensor, input_tensor, group=joined.torch, async_op=late),
        async_op,
    )


def gather(
    tensor: Tensor,
    gather_list: Sequence[Tensor] | None = None,
    dst: int | None = None,
    group: AnyGroup = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Awaited | None:
    """Fill `gather_list[i]` on rank `dst` with rank i's `tensor`; shapes may differ by rank."""
    joined = joined_group(group)
    if joined is None:
        return None
    with joined.telling("gather"):
        require_usable(joined, tensor, *(gather_list or ()))
        place = joined.rank_of(dst, group_dst, "dst")
        require_list_at(gather_list, place, joined, "gather_list", "dst")
        takes = None
        if gather_list is not None:
            require_one_each(gather_list, joined, "gather_list")
            require_one_dtype(tensor, gather_list)
            takes = shapes_of(gather_list)
        call = Call(
            operation="gather",
            settings=f"{dtype_text(tensor)}, to rank {place}",
            sends=_only(place, tuple(tensor.shape), joined),
            takes=takes or (None,) * joined.size,
        )
    sent = {place: tensor}
    taken = {} if gather_list is None else dict(enumerate(gather_list))
    return joined.run(call, partial(_exchange, sent, taken, joined), async_op)


def scatter(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = None,
    src: int | None = None,
    group: AnyGroup = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Awaited | None:
    """Overwrite rank i's `tensor` with `scatter_list[i]` of rank `src`; shapes may differ by rank."""
    joined = joined_group(group)
    if joined is None:
        return None
    with joined.telling("scatter"):
        require_usable(joined, tensor, *(scatter_list or ()))
        source = joined.rank_of(src, group_src, "src")
        require_list_at(scatter_list, source, joined, "scatter_list", "src")
        sends = None
        if scatter_list is not None:
            require_one_each(scatter_list, joined, "scatter_list")
            require_one_dtype(tensor, scatter_list)
            sends = shapes_of(scatter_list)
        call = Call(
            operation="scatter",
            settings=f"{dtype_text(tensor)}, from rank {source}",
            sends=sends or (None,) * joined.size,
            takes=_only(source, tuple(tensor.shape), joined),
        )
    sent = {} if scatter_list is None else dict(enumerate(scatter_list))
    return joined.run(call, partial(_exchange, sent, {source: tensor}, joined), async_op)


def _exchange(sent: dict[int, Tensor], taken: dict[int, Tensor], joined: Group, late: bool) -> Awaited | None:
    """Send and take pieces of any size; what is one's own is copied."""
    operations, copies = [], []
    for peer, tensor in sent.items():
        if peer == joined.rank:
            taken[peer].detach().copy_(tensor.detach())
        elif tensor.numel():
            data = movable(tensor.detach().contiguous())
            operations.append(dist.P2POp(dist.isend, data, group=joined.torch, group_peer=peer, tag=_TAG))
    for peer, tensor in taken.items():
        if peer != joined.rank and tensor.numel():
            place = tensor.detach() if tensor.is_contiguous() else torch.empty_like(tensor).contiguous()
            copies.append((tensor, place))
            operations.append(dist.P2POp(dist.irecv, movable(place), group=joined.torch, group_peer=peer, tag=_TAG))
    works = dist.batch_isend_irecv(operations) if operations else []

    def finish() -> None:
        for tensor, place in copies:
            if place.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(place)

    return finishing(works, finish, late)


def all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: AnyGroup = None,
    async_op: bool = False,
) -> Awaited | None:
    """Fill `output_tensor_list[i]` with rank i's `input_tensor_list[own rank]`; shapes may all differ."""
    joined = joined_group(group)
    if joined is None:
        return None
    with joined.telling("all_to_all"):
        require_usable(joined, *input_tensor_list, *output_tensor_list)
        require_one_each(output_tensor_list, joined, "output_tensor_list")
        require_one_each(input_tensor_list, joined, "input_tensor_list")
        require_one_dtype(input_tensor_list[0], [*output_tensor_list, *input_tensor_list])
        call = Call(
            operation="all_to_all",
            settings=dtype_text(input_tensor_list[0]),
            sends=shapes_of(input_tensor_list),
            takes=shapes_of(output_tensor_list),
        )
        sent, taken = dict(enumerate(input_tensor_list)), dict(enumerate(output_tensor_list))
        require_shape(taken[joined.rank], tuple(sent[joined.rank].shape), "output_tensor_list with room for its own")
    return joined.run(call, partial(_exchange, sent, taken, joined), async_op)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: AnyGroup = None,
    async_op: bool = False,
) -> Awaited | None:
    """Send the i-th part of `input`, along dim 0, to rank i, and put what rank i sends into the i-th part of `output`.

    Parts are equal unless split sizes say otherwise.
    """
    joined = joined_group(group)
    if joined is None:
        return None
    with joined.telling("all_to_all_single"):
        require_usable(joined, output, input)
        require_one_dtype(input, [output])
        sends = split_shapes(input, input_split_sizes, joined, "input")
        takes = split_shapes(output, output_split_sizes, joined, "output")
        call = Call(operation="all_to_all_single", settings=dtype_text(input), sends=sends, takes=takes)
    into = None if output_split_sizes is None else list(output_split_sizes)
    out_of = None if input_split_sizes is None else list(input_split_sizes)
    return joined.run(
        call,
        lambda late: dist.all_to_all_single(output, input, into, out_of, group=joined.torch, async_op=late),
        async_op,
    )


def barrier(
    group: AnyGroup = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: timedelta | None = None,
) -> Awaited | None:
    """Return once every rank has come here; after `timeout` (the group's) raises CollectiveError naming who has not."""
    joined = joined_group(group)
    if joined is None:
        return None
    devices = None if device_ids is None else list(device_ids)
    issue: Issue = lambda late: dist.barrier(group=joined.torch, async_op=late, device_ids=devices)  # noqa: E731
    return joined.run(Call(operation="barrier", settings=""), issue, async_op, timeout)


def _only(place: int, shape: Shape, joined: Group) -> tuple[Shape | None, ...]:
    """A shape for one rank, and nothing for the others."""
    return tuple(shape if rank == place else None for rank in range(joined.size))

"""The optimizer state of parameters that belong to one worker, as the other workers see it."""

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.optim import Optimizer

from rankless.collectives.byte_messages import all_gather_bytes
from rankless.ownership.divided_parameter import DividedParameter
from rankless.ownership.optimizer_pieces import list_parameters
from rankless.ownership.partitioned_tensor import Partition, WholeValues, find_partition, make_partitioned_tensor
from rankless.ownership.piece_layout import order_dims
from rankless.parallel.mesh import Mesh
from rankless.records.encoding import encode_msgpack


class SharedEntry(msgspec.Struct, frozen=True, array_like=True):
    """An entry of the state of a parameter that belongs to another worker."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    number: float | None
    """The value of a tensor without dims."""


def share_state(optimizer: Optimizer, divided: Mapping[int, DividedParameter], values: WholeValues) -> None:
    """Show the state of parameters that belong to one worker on all others too. Collective if there are any.

    Args:
        optimizer: The optimizer, which has just made a step.
        divided: The divided parameters by the id of the parameter.
        values: Gathers whole values for the script.
    """
    known = [divided[id(item)] for item in list_parameters(optimizer) if id(item) in divided]
    owned = [member for member in known if member.is_owned]
    if not owned:
        return
    group, device = values.group, owned[0].parameter.device
    mesh = Mesh(rank=group.rank, size=group.size, group=group.group, device=device)
    own = [
        describe_state(optimizer.state.get(member.parameter, {})) if member.has_rows(group.rank) else []
        for member in owned
    ]
    everyone = [
        msgspec.msgpack.decode(data, type=list[list[SharedEntry]])
        for data in all_gather_bytes(encode_msgpack(own), mesh=mesh)
    ]
    for number, member in enumerate(owned):
        if not member.has_rows(group.rank):
            entries = next(item[number] for rank, item in enumerate(everyone) if member.has_rows(rank))
            before = optimizer.state.setdefault(member.parameter, {})
            shown = {entry.key: show_shared(entry, before.get(entry.key), member, values) for entry in entries}
            before.clear()
            before.update(shown)
    sort_state(optimizer)
    states = [optimizer.state.get(member.parameter, {}) for member in owned]
    values.find_open(filter(None, [find_partition(value) for state in states for value in state.values()]))


def describe_state(entries: Mapping[str, Any]) -> list[SharedEntry]:
    """Return a parameter's state without its elements."""
    return [
        SharedEntry(
            key,
            str(value.dtype).removeprefix("torch."),
            tuple(value.shape),
            tuple(value.stride()),
            None if value.dim() else value.item(),
        )
        for key, value in entries.items()
        if isinstance(value, Tensor)
    ]


def show_shared(entry: SharedEntry, before: Any, divided: DividedParameter, values: WholeValues) -> Tensor:
    """Return an entry of the state of another worker's parameter, as the script sees it."""
    dtype = getattr(torch, entry.dtype)
    if entry.number is not None:
        if isinstance(before, Tensor) and before.dim() == 0 and before.dtype == dtype:
            kept: Tensor = before.fill_(entry.number)
            return kept
        made: Tensor = torch.tensor(entry.number, dtype=dtype, device="cpu")
        return made
    if isinstance(before, Tensor):
        known = find_partition(before)
        if known is not None and (known.layout.shape, known.piece.dtype) == (entry.shape, dtype):
            return before
    layout = divided.own(entry.shape, order_dims(entry.strides))
    piece = torch.empty(layout.piece_shape(values.group.rank), dtype=dtype, device=divided.piece.device)
    return make_partitioned_tensor(
        Partition(layout, piece, f"{entry.key} of {divided.name}", values, device=divided.parameter.device), before
    )


def sort_state(optimizer: Optimizer) -> None:
    """Put the state of an optimizer in the order of its parameters.

    A script may read, and so gather, one entry after the other. The order must be the same on all workers.
    """
    places = {id(item): place for place, item in enumerate(list_parameters(optimizer))}
    entries = sorted(optimizer.state.items(), key=lambda item: places.get(id(item[0]), len(places)))
    optimizer.state.clear()
    optimizer.state.update(entries)

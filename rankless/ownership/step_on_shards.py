"""Let a script's own optimizer step on this worker's shards of parameters.

Note [steps on shards]: during a step, the optimizer's groups and state refer to shards in place of divided parameters.
Otherwise they refer to the parameters, as the script expects, and the state is made of divided tensors. This is exact
for optimizers that compute each element from the elements at the same place. `ELEMENTWISE` lists PyTorch's;
tests/jobs/test_optimizers.py shows for each that a step on the whole equals a step on parts, bit by bit. Optimizers
that read whole tensors (`READS_WHOLE`) step on whole parameters, each of which belongs to one worker: its shard is the
parameter, and the others' shards have no rows. After a step `share_state` shows the state on all workers.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.optim import Optimizer

from rankless.collectives.byte_messages import all_gather_bytes
from rankless.errors import ConfigError
from rankless.ownership.optimizer_parameter_shards import DividedParameter
from rankless.ownership.partitioned_tensor import (
    Partition,
    WholeValues,
    find_partition,
    make_partitioned_tensor,
)
from rankless.ownership.shard_layout import ShardLayout, order_dims
from rankless.parallel.mesh import Mesh
from rankless.records.encoding import encode_msgpack

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
"""The optimizers that step on shards exactly. A subclass may compute anything."""
READS_WHOLE: tuple[type[Optimizer], ...] = (torch.optim.Adafactor, torch.optim.Muon)
"""The optimizers that step on one parameter at a time, and read the whole of it."""


def list_parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer."""
    return [item for group in optimizer.param_groups for item in group["params"]]


def require_divisible(optimizer: Optimizer, *, job: str, line: str) -> None:
    """Raise `ConfigError` for an optimizer that can step neither on shards nor on one parameter at a time."""
    kind, known = type(optimizer), (*ELEMENTWISE, *READS_WHOLE)
    if kind not in known:
        raise ConfigError(
            expected="where workers divide parameters (zero=, a pipeline, heterogeneous workers), an optimizer of "
            "torch.optim that steps on each element or each tensor by itself: "
            f"{', '.join(item.__name__ for item in known)}",
            found=f"{kind.__module__}.{kind.__qualname__} in job {job!r}",
            fix="use one of these, or a run that does not divide parameters",
            where=line,
        )
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    for hook in hooks:
        if not type(hook).__module__.startswith("rankless."):
            raise ConfigError(
                expected=f"no hooks on the steps of job {job!r}'s optimizer, which would see shards of parameters "
                "where workers divide them",
                found=f"the hook {getattr(hook, '__qualname__', type(hook).__qualname__)}",
                fix="do its work before or after the call of the job, or use a run that does not divide parameters",
                where=line,
            )


@contextlib.contextmanager
def on_shards(optimizer: Optimizer, divided: Mapping[int, DividedParameter], values: WholeValues) -> Iterator[None]:
    """Within the context, an optimizer has shards in place of divided parameters; see Note [steps on shards].

    Args:
        optimizer: The optimizer.
        divided: The divided parameters by the id of the parameter.
        values: Gathers whole values for the script.
    """
    rank = values.group.rank
    lists = [group["params"] for group in optimizer.param_groups]
    members = [divided[id(item)] for params in lists for item in params if id(item) in divided]
    state: dict[Any, Any] = optimizer.state
    local: defaultdict[Any, Any] = defaultdict(dict)
    for owner, entries in state.items():
        known = divided.get(id(owner))
        if known is None:
            local[owner] = entries
        else:
            for shard, holder in known.list_stepped(rank):
                local[shard] = {
                    key: take_state(value, known, key, holder, is_copy=shard is not known.shard)
                    for key, value in entries.items()
                }
    for member in members:
        member.begin_step(rank)
    optimizer.state = local
    for group, params in zip(optimizer.param_groups, lists, strict=True):
        found = [(item, divided.get(id(item))) for item in params]
        shards = [[item] if known is None else [each for each, _ in known.list_stepped(rank)] for item, known in found]
        group["params"] = [each for several in shards for each in several]
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, lists, strict=True):
            group["params"] = params
        shown = show_states(local, state, members, values)
        state.clear()
        state.update(shown)
        optimizer.state = state  # type: ignore[assignment]  # the script may have a reference to it
        for member in members:
            member.end_step(rank)


def show_states(
    local: Mapping[Any, Any], before: Mapping[Any, Any], members: Sequence[DividedParameter], values: WholeValues
) -> dict[Any, Any]:
    """Return the state of an optimizer as the script sees it, after a step.

    Args:
        local: The state of shards and copies, and of parameters that are not divided.
        before: The state that the script has seen so far.
        members: The divided parameters of the optimizer.
        values: Gathers whole values for the script.
    """
    stepped = {id(member.shard): member for member in members}
    copied = {id(copy): (member, worker) for member in members for worker, copy in member.copies.items()}
    # Workers without rows of a parameter get its state from the one that has them: see `share_state`.
    elsewhere = [member.parameter for member in members if not member.has_rows(values.group.rank)]
    shown: dict[Any, Any] = {parameter: before[parameter] for parameter in elsewhere if parameter in before}
    for owner, entries in local.items():
        known = stepped.get(id(owner))
        if known is not None:
            earlier = before.get(known.parameter, {})
            shown[known.parameter] = {
                key: show_state(value, earlier.get(key), known, key, values) for key, value in entries.items()
            }
        elif id(owner) in copied:  # after the shard of its parameter
            member, worker = copied[id(owner)]
            keep_copies(shown.setdefault(member.parameter, {}), entries, member, worker, values)
        else:
            shown[owner] = entries
    return shown


def take_state(value: Any, divided: DividedParameter, key: str, rank: int, *, is_copy: bool = False) -> Any:
    """Return a worker's part of an entry of a parameter's state: this worker's own, or one of which it has a copy."""
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 0:
        return value.clone() if is_copy else value  # an optimizer counts its steps in place
    partition = find_partition(value)
    if partition is not None:
        layout = find_state_layout(tuple(value.shape), divided)
        shard = partition.copies.get(rank) if is_copy else partition.shard
        if layout is not None and layout.placement == partition.layout.placement and shard is not None:
            return shard
        value = partition.gather()  # of another optimizer, or of a parameter that was divided otherwise
    if divided.is_owned:
        return value.clone() if hasattr(value, "was_divided") else value
    if tuple(value.shape) != divided.layout.shape:
        raise ConfigError(
            expected=f"optimizer state of the shape {list(divided.layout.shape)} for {divided.name}, which is divided "
            "between workers",
            found=f"{key} of the shape {list(value.shape)}",
            fix="load the state that the optimizer has saved, or omit zero=",
        )
    return divided.place(divided.layout.copy_shard(value, rank))


def list_state_partitions(optimizer: Optimizer, members: Iterable[DividedParameter]) -> list[Partition]:
    """Return how the states of divided parameters are divided, in the same order on all workers."""
    states = [optimizer.state.get(member.parameter, {}) for member in members]
    found = [find_partition(value) for state in states for value in state.values() if isinstance(value, Tensor)]
    return [each for each in found if each is not None]


def keep_copies(
    shown: dict[str, Any], entries: Mapping[str, Any], divided: DividedParameter, worker: int, values: WholeValues
) -> None:
    """Keep the state of a copy of another worker's shard with that of the parameter, as the script sees it.

    A worker that has a copy and no rows of its own shows the state here, and the others in `share_state`.
    """
    for key, value in entries.items():
        before = shown.get(key)
        known = find_partition(before) if isinstance(before, Tensor) else None
        if isinstance(value, Tensor) and value.dim() == 0 and isinstance(before, Tensor):
            before.copy_(value)
        elif not isinstance(value, Tensor) or value.dim() == 0:
            shown[key] = value
        elif known is not None:
            known.copies[worker] = value
        else:
            layout = divided.own(tuple(value.shape), order_dims(value.stride()))
            shard = value.new_empty(layout.shard_shape(values.group.rank))
            name, device = f"{key} of {divided.name}", divided.parameter.device
            shown[key] = make_partitioned_tensor(
                Partition(layout, shard, name, values, device=device, copies={worker: value}), before
            )


def show_state(value: Any, before: Any, divided: DividedParameter, key: str, values: WholeValues) -> Any:
    """Return an entry of a parameter's state as the script sees it: its tensors are divided like the parameter."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    known = find_partition(before) if isinstance(before, Tensor) else None
    if known is not None and known.shard is value:
        return before
    # Where dims have one row, the order of dims cannot be told from a worker's shard; all must have the same.
    layout = divided.own(tuple(value.shape), order_dims(value.stride())) if divided.is_owned else divided.layout
    return make_partitioned_tensor(
        Partition(layout, value, f"{key} of {divided.name}", values, device=divided.parameter.device), before
    )


def find_state_layout(shape: tuple[int, ...], divided: DividedParameter) -> ShardLayout | None:
    """Return how an entry of a parameter's state is divided, like the parameter; None for one of another shape.

    Args:
        shape: The shape of the whole entry.
        divided: The parameter.
    """
    layout = divided.layout
    if not shape or (not divided.is_owned and shape != layout.shape):
        return None
    order = layout.order if shape == layout.shape else tuple(range(len(shape)))
    return divided.own(shape, order) if divided.is_owned else ShardLayout(shape, order, layout.placement)


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
            if not entries and member.parameter not in optimizer.state:
                continue
            before = optimizer.state.setdefault(member.parameter, {})
            shown = {entry.key: show_shared(entry, before.get(entry.key), member, values) for entry in entries}
            before.clear()
            before.update(shown)
    sort_state(optimizer)


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
        if known is not None and (known.layout.shape, known.shard.dtype) == (entry.shape, dtype):
            return before
    layout = divided.own(entry.shape, order_dims(entry.strides))
    shard = torch.empty(layout.shard_shape(values.group.rank), dtype=dtype, device=divided.shard.device)
    return make_partitioned_tensor(
        Partition(layout, shard, f"{entry.key} of {divided.name}", values, device=divided.parameter.device), before
    )


def sort_state(optimizer: Optimizer) -> None:
    """Put the state of an optimizer in the order of its parameters.

    A script may read, and so gather, one entry after the other. The order must be the same on all workers.
    """
    places = {id(item): place for place, item in enumerate(list_parameters(optimizer))}
    entries = sorted(optimizer.state.items(), key=lambda item: places.get(id(item[0]), len(places)))
    optimizer.state.clear()
    optimizer.state.update(entries)

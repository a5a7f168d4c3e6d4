"""Make states whole again on workers that have divided them, after another one was lost.

Note [states of lost workers]: where workers may be lost, what one worker has of a parameter is on another one too; see
Note [copies of shards]. After a loss the workers that are left send each other the states that each of them has. All
then have all states whole, and divide them anew with the next call of a job, as at its first. They do so before the
next operation of all workers. By then each has made all that follows from the last one, such as an optimizer's step.
So copies are equal again, although some workers may have been further than others when one was lost.

Values that the script has read whole are there already, perhaps with its changes. Shards are newer from a step until
such values are updated. Parameters that every worker has whole are older than their shards from a step until they have
been gathered.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rankless.collectives.byte_messages import all_gather_bytes
from rankless.collectives.mesh_collectives import broadcast
from rankless.errors import LostWorkerError
from rankless.ownership.optimizer_parameter_shards import DividedParameter
from rankless.ownership.partitioned_tensor import Partition, WholeValues, find_partition
from rankless.ownership.shard_layout import GATHER_BYTES, ShardLayout, group_in_order
from rankless.ownership.state_owner import GradientSums
from rankless.ownership.step_on_shards import (
    SharedEntry,
    describe_state,
    find_state_layout,
    list_parameters,
    sort_state,
)
from rankless.parallel.mesh import Mesh
from rankless.records.encoding import encode_msgpack


class _Report(msgspec.Struct, frozen=True):
    """What one worker has of divided states."""

    worker: int
    """Its rank among the workers that have divided them."""
    are_shards_newer: bool
    is_gathering: bool
    is_whole: list[bool]
    """For each parameter whether the script has read its whole value."""
    has_gradient: list[bool]
    has_sum: list[list[bool]]
    """For each parameter whether each job has accumulated gradients for its shard."""
    states: list[list[list[SharedEntry]]]
    """For each optimizer the states of its divided parameters."""


class DividedStates:
    """The states of parameters that workers divide, one of which may have been lost.

    Args:
        values: Gathers whole values for the script, among the workers that have divided them.
        members: The parameters, in the order in which they were divided.
        optimizers: Those that step them, in the order in which their jobs have divided parameters.
        sums: What has accumulated gradients for shards, in the order in which jobs have begun to.
        is_gathering: Whether parameters that every worker has whole are older than their shards.
        fix: What helps if all workers were lost that had a state.
    """

    def __init__(
        self,
        values: WholeValues,
        members: Sequence[DividedParameter],
        optimizers: Sequence[Optimizer],
        sums: Sequence[GradientSums],
        *,
        is_gathering: bool,
        fix: str,
    ) -> None:
        self._fix = fix
        self._rank, self._copy_holders = values.group.rank, values.copy_holders
        self._members, self._optimizers, self._sums = members, optimizers, sums
        self._are_shards_newer, self._is_gathering = values.are_shards_newer, is_gathering
        self._pieces: list[SentShard] = []

    def collect(self, mesh: Mesh, *, with_gradients: bool) -> Callable[[], None]:
        """Return a function that makes the states whole on this worker. Collective.

        A worker that was interrupted while it divided parameters may have divided fewer than others: the rest is whole
        on all of them.

        Args:
            mesh: The workers that are left.
            with_gradients: Whether a step follows with the gradients that workers have.

        Raises:
            LostWorkerError: All workers were lost that had a state.
        """
        reports = [
            msgspec.msgpack.decode(data, type=_Report)
            for data in all_gather_bytes(encode_msgpack(self._report(with_gradients)), mesh=mesh)
        ]
        known = min(len(report.is_whole) for report in reports)
        self._are_shards_newer = any(report.are_shards_newer for report in reports)
        self._is_gathering = any(report.is_gathering for report in reports)
        sources = {
            id(member.parameter): find_sources(member, self._copy_holders, reports, self._fix)
            for member in self._members[:known]
            if any(member.layout.placement.lengths)
        }
        restored = [self._collect_parameter(number, sources, reports) for number in range(len(self._members))]
        states = [
            state
            for number in range(min(len(report.states) for report in reports))
            for state in self._collect_states(number, sources, reports)
        ]
        self._send_all(mesh)

        def finish() -> None:
            for show in restored:
                show()
            for optimizer, stepped, entries in states:
                show_whole_state(optimizer, stepped, entries)
            for optimizer in self._optimizers:
                sort_state(optimizer)

        return finish

    def _report(self, with_gradients: bool) -> _Report:
        partitions = [find_partition(member.parameter) for member in self._members]
        return _Report(
            worker=self._rank,
            are_shards_newer=self._are_shards_newer,
            is_gathering=self._is_gathering,
            is_whole=[known is not None and known.whole is not None for known in partitions],
            has_gradient=[
                with_gradients and member.divides_gradient and has_dense_gradient(member) for member in self._members
            ],
            has_sum=[[each.find_sum(member.shard) is not None for each in self._sums] for member in self._members],
            states=[
                [describe_state(optimizer.state.get(parameter, {})) for parameter in self._list_stepped(optimizer)]
                for optimizer in self._optimizers
            ],
        )

    def _list_stepped(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the divided parameters of an optimizer."""
        divided = {id(member.parameter) for member in self._members}
        return [parameter for parameter in list_parameters(optimizer) if id(parameter) in divided]

    def _collect_parameter(
        self, number: int, sources: Mapping[int, "Sources"], reports: Sequence[_Report]
    ) -> Callable[[], None]:
        """Return a function that makes a parameter whole, and its gradient if a step follows."""
        member = self._members[number]
        partition = find_partition(member.parameter)
        value = None if partition is None else partition.whole
        gradient = None if member.divides_gradient else member.parameter.grad
        sums: dict[int, Tensor] = {}
        if not any(member.layout.placement.lengths):  # workers with other ranks along outer axes have all rows
            value = None if partition is None else member.shard.detach()
            known = [(place, each.find_sum(member.shard)) for place, each in enumerate(self._sums)]
            sums = {place: found for place, found in known if found is not None}
        found = sources.get(id(member.parameter))
        if found is not None:
            like = member.shard.detach()
            is_old = self._is_gathering
            if partition is not None:
                is_old = self._are_shards_newer or not all(report.is_whole[number] for report in reports)
            if is_old:
                value = self._gather(found, member.layout, like, functools.partial(self._take_value, member))
            if reports[found.first].has_gradient[number]:
                gradient = self._gather(found, member.layout, like, functools.partial(take_gradient, member))
            for place, has_sum in enumerate(reports[found.first].has_sum[number]):
                if has_sum:
                    take = functools.partial(take_sum, member, self._sums[place])
                    sums[place] = self._gather(found, member.layout, like, take)

        def finish() -> None:
            for place, whole in sums.items():
                self._sums[place].make_sum_whole(member.parameter, [member.shard, *member.copies.values()], whole)
            show_whole_parameter(member, value, gradient)

        return finish

    def _collect_states(
        self, number: int, sources: Mapping[int, "Sources"], reports: Sequence[_Report]
    ) -> Iterator[tuple[Optimizer, Tensor, dict[str, Tensor]]]:
        """Yield the whole state of each divided parameter of an optimizer."""
        optimizer = self._optimizers[number]
        members = {id(member.parameter): member for member in self._members}
        for place, parameter in enumerate(self._list_stepped(optimizer)):
            found = sources.get(id(parameter))
            if found is not None:
                own = optimizer.state.get(parameter, {})
                entries = reports[found.first].states[number][place]
                yield (
                    optimizer,
                    parameter,
                    {entry.key: self._collect_entry(entry, own, members[id(parameter)], found) for entry in entries},
                )

    def _collect_entry(
        self, entry: SharedEntry, own: Mapping[str, Any], member: DividedParameter, sources: "Sources"
    ) -> Tensor:
        dtype = getattr(torch, entry.dtype)
        if entry.number is not None:
            return torch.tensor(entry.number, dtype=dtype, device="cpu")
        layout = find_state_layout(entry.shape, member)
        if layout is None:  # not divided
            plain: Tensor = own[entry.key]
            return plain
        like = torch.empty(0, dtype=dtype, device=member.shard.device)

        def take(worker: int) -> Tensor:
            value = own[entry.key]
            partition = find_partition(value)
            return layout.get_shard(value, worker) if partition is None else self._take(partition, worker)

        return self._gather(sources, layout, like, take)

    def _take_value(self, member: DividedParameter, worker: int) -> Tensor:
        """Return the value of a worker's shard of a parameter."""
        partition = find_partition(member.parameter)
        return member.get_shard_of(worker).detach() if partition is None else self._take(partition, worker)

    def _take(self, partition: Partition, worker: int) -> Tensor:
        """Return a worker's shard, this one's or a copy, with what the script has changed in the whole value."""
        if self._are_shards_newer or partition.whole is None:
            return partition.copies.get(worker, partition.shard).detach()
        return partition.layout.get_shard(partition.whole, worker)

    def _gather(self, sources: "Sources", layout: ShardLayout, like: Tensor, take: Callable[[int], Tensor]) -> Tensor:
        """Return a whole tensor, which `_send_all` fills on all workers.

        Args:
            sources: The workers that have its shards.
            layout: How it is divided.
            like: A tensor of its dtype and device.
            take: Returns the shard of a worker, which this one has.
        """
        whole = like.new_empty_strided(layout.shape, layout.strides)
        self._pieces += [SentShard(worker, source, whole, layout, take) for worker, source in sources.by_worker.items()]
        return whole

    def _send_all(self, mesh: Mesh) -> None:
        """Send all shards from the workers that have them to all others. Collective."""
        groups = group_in_order(
            sorted(self._pieces, key=lambda piece: (piece.worker, piece.source)),
            kind=lambda piece: (piece.worker, piece.source, piece.whole.dtype, piece.whole.device),
            size=lambda piece: piece.size * piece.whole.element_size(),
            limit=lambda _piece, _groups: GATHER_BYTES,
        )
        for pieces in groups:
            worker, source = pieces[0].worker, pieces[0].source
            flat = pieces[0].whole.new_empty(sum(piece.size for piece in pieces))
            if mesh.rank == source:
                torch.cat([piece.layout.flatten(piece.take(worker)) for piece in pieces], out=flat)
            if flat.numel():
                broadcast(flat.view(torch.uint8), among=mesh, source=source)
            for piece, part in zip(pieces, flat.split([piece.size for piece in pieces]), strict=True):
                layout = piece.layout
                shard = layout.view_flat(part, layout.shard_shape(worker))
                layout.view_range(piece.whole, worker).copy_(layout.view_shard(shard, worker))
        self._pieces.clear()


@dataclass(frozen=True)
class SentShard:
    """A shard that one of the workers that are left sends to all."""

    worker: int
    """The worker to which it belonged."""
    source: int
    """The rank of the one that sends it."""
    whole: Tensor
    layout: ShardLayout
    take: Callable[[int], Tensor]
    """Returns it where it is."""

    @property
    def size(self) -> int:
        """The number of its elements."""
        return self.layout.shard_size(self.worker)


@dataclass(frozen=True)
class Sources:
    """The workers that are left and have the rows of a parameter."""

    by_worker: Mapping[int, int]
    """For each worker that has had rows, the rank of the one that has them now."""

    @property
    def first(self) -> int:
        """The rank of the first of them."""
        return next(iter(self.by_worker.values()))


def show_whole_parameter(member: DividedParameter, value: Tensor | None, gradient: Tensor | None) -> None:
    """Make a parameter whole. A whole value that the script has read stays where it is.

    Args:
        member: The parameter.
        value: Its whole value; None if it is the parameter's already.
        gradient: Its whole gradient; None if it has none.
    """
    parameter, partition = member.parameter, find_partition(member.parameter)
    if partition is not None:
        assert value is not None, "a worker that alone has divided a parameter has the whole value"
        make_plain(parameter, keep_whole(partition, value))
    elif value is not None:
        with torch.no_grad():
            parameter.copy_(value)
    parameter.grad = gradient


def make_plain(tensor: Any, value: Tensor) -> None:
    """Make a divided parameter, or a divided tensor, a plain one with this value."""
    kind = nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor
    del tensor.partition
    tensor.__class__ = kind
    tensor.data = value


def find_sources(
    member: DividedParameter, copy_holders: Sequence[int], reports: Sequence[_Report], fix: str
) -> Sources:
    """Return the workers that have the rows of a parameter now. Raises LostWorkerError if some rows are lost.

    Args:
        member: The parameter.
        copy_holders: For each worker the one with copies of its shards.
        reports: What the workers that are left have, by rank.
        fix: What helps if there is no source.
    """
    ranks = {report.worker: rank for rank, report in enumerate(reports)}
    layout, found = member.layout, {}
    for worker, length in enumerate(layout.placement.lengths):
        if not length:
            continue
        holders = [worker, *layout.copies, *copy_holders[worker : worker + 1]]
        source = next((ranks[each] for each in holders if each in ranks), None)
        if source is None:
            raise LostWorkerError(
                expected=f"a worker that has {member.name} and its optimizer state, or a copy of them",
                found="none left: each of them was killed",
                fix=fix,
            )
        found[worker] = source
    return Sources(found)


def take_sum(member: DividedParameter, sums: GradientSums, worker: int) -> Tensor:
    """Return the gradient that is accumulated for a worker's shard of a parameter."""
    found = sums.find_sum(member.get_shard_of(worker))
    assert found is not None, "all workers have one, or none"
    return found


def take_gradient(member: DividedParameter, worker: int) -> Tensor:
    """Return the gradient of a worker's shard of a parameter."""
    gradient = member.get_shard_of(worker).grad
    assert gradient is not None, "all workers have one, or none"
    return gradient


def has_dense_gradient(member: DividedParameter) -> bool:
    """Return whether the shard of a worker has a gradient. Raises LostWorkerError for a sparse one."""
    gradient = member.shard.grad
    if gradient is None or gradient.layout is torch.strided:
        return gradient is not None
    raise LostWorkerError(
        expected="dense gradients, where a worker is lost in the step of a parameter that one worker has",
        found=f"a gradient with the layout {gradient.layout}",
        fix="use a table of rankless.parameter_server, or sparse=False",
    )


def keep_whole(partition: Partition, value: Tensor) -> Tensor:
    """Return a value in the memory of the whole value that the script may have read."""
    if partition.whole is None:
        partition.whole = value
    elif partition.whole is not value:
        with torch.no_grad():
            partition.whole.copy_(value)
    return partition.whole


def show_whole_state(optimizer: Optimizer, parameter: Tensor, entries: Mapping[str, Tensor]) -> None:
    """Give an optimizer the whole state of a parameter. What is divided again stays the object that it is."""
    before = optimizer.state.get(parameter, {})
    shown = {key: keep_entry(before.get(key), value) for key, value in entries.items()}
    others = {key: value for key, value in before.items() if not isinstance(value, Tensor)}
    if shown or before:
        optimizer.state[parameter] = {**others, **shown}


def keep_entry(known: Any, value: Tensor) -> Tensor:
    """Return an entry of a state with a whole value: the tensor that the script has, if it has one."""
    if not isinstance(known, Tensor) or known.dtype != value.dtype or known.shape != value.shape:
        return value
    partition = find_partition(known)
    if partition is None:
        with torch.no_grad():
            return known.copy_(value)
    make_plain(known, keep_whole(partition, value))
    known.was_divided = True  # type: ignore[attr-defined]  # see `make_partitioned_tensor`
    return known

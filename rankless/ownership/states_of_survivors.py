"""Make states whole again on workers that have divided them, after another one was lost.

Note [states of lost workers]: where workers may be lost, what one worker has of a parameter is on another one too; see
Note [copies of shards]. After a loss the workers that are left send each other the states that each of them has. All
then have all states whole, and divide them anew with the next call of a job, as at its first. They do so before the
next operation of all workers. By then each has made all that follows from the last one, such as an optimizer's step.
So copies are equal again, although some workers may have been further than others when one was lost.

Values that the script has read whole are there already, perhaps with its changes. Shards are newer from a step until
such values are updated.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rankless.collectives.byte_messages import all_gather_bytes
from rankless.collectives.mesh_collectives import broadcast
from rankless.errors import LostWorkerError
from rankless.ownership.partitioned_tensor import Partition, find_partition
from rankless.ownership.shard_layout import make_dense_strides
from rankless.ownership.sharded_parameters import DividedParameter
from rankless.ownership.step_on_shards import SharedEntry, describe_state, list_parameters
from rankless.parallel.mesh import Mesh
from rankless.records.encoding import encode_msgpack


class _Report(msgspec.Struct, frozen=True):
    """What one worker has of divided states."""

    worker: int
    """Its rank among the workers that have divided them."""
    are_shards_newer: bool
    is_whole: list[bool]
    """For each parameter whether the script has read its whole value."""
    has_gradient: list[bool]
    states: list[list[list[SharedEntry]]]
    """For each optimizer the states of its divided parameters."""


class DividedStates:
    """The states of parameters that workers divide, one of which may have been lost.

    Args:
        rank: The rank of this worker among those that have divided them.
        members: The parameters, in the order in which they were divided.
        optimizers: Those that step them, in the order in which their jobs have divided parameters.
        are_shards_newer: Whether shards have changed since the script has read whole values.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[DividedParameter],
        optimizers: Sequence[Optimizer],
        *,
        are_shards_newer: bool,
    ) -> None:
        self._rank, self._members, self._optimizers = rank, members, optimizers
        self._are_shards_newer = are_shards_newer

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
        sources = {id(member.parameter): find_source(member, reports) for member in self._members[:known]}
        restored = [self._collect_parameter(number, sources, reports, mesh) for number in range(len(self._members))]
        states = [
            state
            for number in range(min(len(report.states) for report in reports))
            for state in self._collect_states(number, sources, reports, mesh)
        ]

        def finish() -> None:
            for parameter in restored:
                parameter.finish()
            for optimizer, stepped, entries in states:
                show_whole_state(optimizer, stepped, entries)

        return finish

    def _report(self, with_gradients: bool) -> _Report:
        partitions = [find_partition(member.parameter) for member in self._members]
        return _Report(
            worker=self._rank,
            are_shards_newer=self._are_shards_newer,
            is_whole=[known is not None and known.whole is not None for known in partitions],
            has_gradient=[
                with_gradients and member.has_rows(self._rank) and has_dense_gradient(member.shard)
                for member in self._members
            ],
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
        self, number: int, sources: Mapping[int, int], reports: Sequence[_Report], mesh: Mesh
    ) -> "RestoredParameter":
        """Return a parameter with its whole value, and its gradient if a step follows. Collective."""
        member = self._members[number]
        partition = find_partition(member.parameter)
        assert partition is not None, "a stage owns values, gradients and optimizer states of its parameters"
        value, gradient = partition.whole, None
        source = sources.get(id(member.parameter))
        if source is not None:
            if self._are_shards_newer or not all(report.is_whole[number] for report in reports):
                value = send_whole(get_shard(partition, self._are_shards_newer), partition, source, mesh)
            if reports[source].has_gradient[number]:
                gradient = send_whole(member.shard.grad, partition, source, mesh)
        assert value is not None, "a worker that alone has divided a parameter has the whole value"
        return RestoredParameter(member, partition, value, gradient)

    def _collect_states(
        self, number: int, sources: Mapping[int, int], reports: Sequence[_Report], mesh: Mesh
    ) -> Iterator[tuple[Optimizer, Tensor, dict[str, Tensor]]]:
        """Yield the whole state of each divided parameter of an optimizer. Collective."""
        optimizer = self._optimizers[number]
        for place, parameter in enumerate(self._list_stepped(optimizer)):
            source = sources.get(id(parameter))
            if source is not None:
                own = optimizer.state.get(parameter, {})
                entries = reports[source].states[number][place]
                yield (
                    optimizer,
                    parameter,
                    {entry.key: self._send_entry(entry, own, parameter, source, mesh) for entry in entries},
                )

    def _send_entry(
        self, entry: SharedEntry, own: Mapping[str, Any], parameter: Tensor, source: int, mesh: Mesh
    ) -> Tensor:
        dtype = getattr(torch, entry.dtype)
        if entry.number is not None:
            return torch.tensor(entry.number, dtype=dtype, device="cpu")
        whole = torch.empty_strided(entry.shape, entry.strides, dtype=dtype, device=parameter.device)
        if mesh.rank == source:
            value = own[entry.key]
            partition = find_partition(value)
            whole.copy_(value if partition is None else get_shard(partition, self._are_shards_newer))
        return send_memory(whole, source, mesh)


class RestoredParameter:
    """A parameter that becomes whole again.

    Args:
        member: The parameter.
        partition: How it was divided.
        value: Its whole value.
        gradient: Its whole gradient; None if it has none.
    """

    def __init__(self, member: DividedParameter, partition: Partition, value: Tensor, gradient: Tensor | None) -> None:
        self._parameter, self._partition, self._value, self._gradient = member.parameter, partition, value, gradient

    def finish(self) -> None:
        """Make it whole. A whole value that the script has read stays where it is."""
        value = keep_whole(self._partition, self._value)
        make_plain(self._parameter, value)
        self._parameter.grad = self._gradient


def make_plain(tensor: Any, value: Tensor) -> None:
    """Make a divided parameter, or a divided tensor, a plain one with this value."""
    kind = nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor
    del tensor.partition
    tensor.__class__ = kind
    tensor.data = value


def find_source(member: DividedParameter, reports: Sequence[_Report]) -> int:
    """Return the first worker that is left of those that have a parameter. Raises LostWorkerError if there is none."""
    ranks = {report.worker: rank for rank, report in enumerate(reports)}
    found = next((ranks[worker] for worker in member.layout.holders if worker in ranks), None)
    if found is None:
        raise LostWorkerError(
            expected=f"a worker that has {member.name} and its optimizer state",
            found="none left: one worker and the next one of its kind had it, and both were killed",
            fix="start the run again from a checkpoint",
        )
    return found


def get_shard(partition: Partition, is_newer: bool) -> Tensor:
    """Return what this worker holds, with what the script has changed in the whole value unless the shard is newer."""
    return partition.shard.detach() if is_newer else partition.get_current_shard()


def has_dense_gradient(shard: Tensor) -> bool:
    """Return whether a shard has a gradient. Raises LostWorkerError for a sparse one."""
    if shard.grad is None or shard.grad.layout is torch.strided:
        return shard.grad is not None
    raise LostWorkerError(
        expected="dense gradients, where a worker is lost in the step of a parameter that one worker has",
        found=f"a gradient with the layout {shard.grad.layout}",
        fix="use a table of rankless.parameter_server, or sparse=False",
    )


def send_whole(shard: Tensor | None, partition: Partition, source: int, mesh: Mesh) -> Tensor:
    """Return on all workers what one of them has: all rows of a tensor. Collective."""
    layout, local = partition.layout, partition.shard
    strides = make_dense_strides(layout.shape, layout.order)
    whole = torch.empty_strided(layout.shape, strides, dtype=local.dtype, device=partition.device)
    if mesh.rank == source:
        assert shard is not None
        whole.copy_(shard)
    return send_memory(whole, source, mesh)


def send_memory(tensor: Tensor, source: int, mesh: Mesh) -> Tensor:
    """Overwrite a dense tensor with that of one worker, and return it. Collective."""
    if tensor.numel():
        broadcast(tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8), among=mesh, source=source)
    return tensor


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

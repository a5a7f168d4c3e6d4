"""A parameter of which each worker has a shard for its optimizer.

If every worker holds the value whole, the workers gather the shards after each has stepped on its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from rankless.collectives.mesh_collectives import start_all_gather
from rankless.errors import ConfigError
from rankless.ownership.adjacent_shards_in_shared_memory import SharedValue
from rankless.ownership.host_device_copies import copy_to_device, copy_to_host
from rankless.ownership.partitioned_tensor import Partition, WholeValues, divide_parameter, find_partition
from rankless.ownership.shard_layout import GATHER_BYTES, ShardGroup, ShardLayout, group_in_order
from rankless.parallel.mesh import WorkerGroup
from rankless.parallel.tensor_placement import Shard
from rankless.records.parallel_plan import StatePlan


@dataclass(frozen=True, kw_only=True)
class DividedParameter:
    """A parameter of which this worker has a shard for the optimizer.

    Attributes:
        parameter: What the script has.
        shard: What the optimizer steps on.
        layout: How the parameter is divided.
        name: What errors call it.
        divides_value: Whether the worker holds only its shard of the value.
        divides_gradient: Whether it holds only its shard of the gradient.
        is_offloaded: Whether the shard lies in the memory of the host; see Note [offloaded shards].
        shared: Where its value lies, if workers hold the shards of it in one memory.
        copies: The shards of other workers on which this one steps, too, by worker; see Note [copies of shards].
    """

    parameter: nn.Parameter
    shard: nn.Parameter
    layout: ShardLayout
    name: str
    divides_value: bool
    divides_gradient: bool
    is_offloaded: bool
    shared: SharedValue | None = None
    copies: Mapping[int, nn.Parameter] = field(default_factory=dict)

    @property
    def holder(self) -> nn.Parameter:
        """The tensor that has this worker's gradient."""
        return self.shard if self.divides_gradient else self.parameter

    def list_stepped(self, rank: int) -> list[tuple[nn.Parameter, int]]:
        """Return the shards on which a worker's optimizer steps, each with the worker to which it belongs."""
        own = [(self.shard, rank)] if self.has_rows(rank) else []
        return [*own, *((copy, worker) for worker, copy in self.copies.items())]

    def get_shard_of(self, worker: int) -> nn.Parameter:
        """Return the shard of a worker, which is this one or one of whose it has a copy."""
        return self.copies.get(worker, self.shard)

    def begin_step(self, rank: int) -> None:
        """Give the shards the values and the gradients that this worker's optimizer needs."""
        gradient = self.parameter.grad
        for shard, owner in self.list_stepped(rank):
            if not self.divides_value:
                value = self.layout.get_shard(self.parameter.data, owner)
                if self.shares_memory:
                    shard.data = value
                else:
                    shard.data.copy_(value)
            if not self.divides_gradient:
                shard.grad = None if gradient is None else self._take_shard(gradient, owner)

    def end_step(self, rank: int) -> None:
        """Forget the shards of a gradient that the worker has whole."""
        if not self.divides_gradient:
            for shard, _ in self.list_stepped(rank):
                shard.grad = None

    @property
    def is_owned(self) -> bool:
        """Whether one worker has all rows."""
        return len([length for length in self.layout.placement.lengths if length]) == 1

    def has_rows(self, rank: int) -> bool:
        """Return whether a worker has rows of it."""
        return rank in self.layout.holders

    def own(self, shape: tuple[int, ...], order: tuple[int, ...]) -> ShardLayout:
        """Return the layout of a tensor that belongs to the worker that owns the parameter.

        Args:
            shape: The tensor's shape.
            order: Its dims from the slowest to the fastest in memory.
        """
        lengths = tuple(shape[0] if length else 0 for length in self.layout.placement.lengths)
        return ShardLayout(shape, order, Shard(0, lengths), self.layout.copies)

    @property
    def has_ranges(self) -> bool:
        """Whether the parameter's memory is whole, with the shard of each worker as one range of it."""
        is_as_planned = self.parameter.stride() == self.layout.strides
        return not self.divides_value and is_as_planned and self.layout.is_contiguous_shard()

    @property
    def shares_memory(self) -> bool:
        """Whether the shard is a part of the parameter's memory."""
        return self.has_ranges and self.shard.device == self.parameter.device

    def place(self, value: Tensor) -> Tensor:
        """Return what belongs to the shard where the shard lies: on the device, or on the host."""
        return copy_to_host([value])[0] if self.is_offloaded else value

    def _take_shard(self, gradient: Tensor, rank: int) -> Tensor:
        partition = find_partition(gradient)
        if partition is not None:
            is_same = partition.layout == self.layout and rank == partition.group.rank
            gradient = partition.get_current_shard() if is_same else partition.gather()
            return self.place(gradient if is_same else self.layout.copy_shard(gradient, rank))
        if gradient.layout is not torch.strided:
            raise ConfigError(
                expected=f"a dense gradient of {self.name}, which is divided between workers",
                found=f"a gradient with the layout {gradient.layout}",
                fix="use sparse=False, or no zero=",
            )
        if self.layout.is_contiguous_shard() and gradient.stride() == self.layout.strides:
            return self.place(self.layout.get_shard(gradient, rank))
        return self.place(self.layout.copy_shard(gradient, rank))


def make_divided_parameter(
    parameter: nn.Parameter,
    layout: ShardLayout,
    values: WholeValues,
    *,
    name: str,
    state: StatePlan,
    shared: SharedValue | None,
) -> DividedParameter:
    """Divide a parameter, which every worker has whole.

    Args:
        parameter: The parameter.
        layout: How it is divided.
        values: Gathers whole values for the script.
        name: What errors call it.
        state: Which of its value and gradient each worker keeps only its shard of, and where.
        shared: Where the shards of the value go, if they lie in one memory. Workers must be writing.
    """
    whole, rank = parameter.detach(), values.group.rank
    own = layout.copy_shard(whole, rank) if shared is None else shared.shard.copy_(layout.get_shard(whole, rank))

    def make_shard(value: Tensor) -> nn.Parameter:
        placed = copy_to_host([value])[0] if state.offloaded else value
        return nn.Parameter(placed, requires_grad=parameter.requires_grad)

    shard = make_shard(own)
    copied = [worker for worker in values.copied_workers if layout.placement.lengths[worker]]
    copies = {worker: make_shard(layout.copy_shard(whole, worker)) for worker in copied}
    if state.value:
        partition = Partition(layout, shard, name, values, device=whole.device, copies=copies)
        divide_parameter(parameter, partition)
        values.keep(partition, whole)
    return DividedParameter(
        parameter=parameter,
        shard=shard,
        layout=layout,
        name=name,
        divides_value=bool(state.value),
        divides_gradient=bool(state.gradient),
        is_offloaded=state.offloaded,
        shared=shared,
        copies=copies,
    )


def gather_after_step(stepped: Sequence[DividedParameter], group: WorkerGroup) -> None:
    """Gather the shards of parameters into the parameters of all workers.

    Args:
        stepped: The parameters.
        group: The workers that have the shards.
    """
    pending = None
    for members in group_by_kind(stepped):
        gather = ParameterGather(members, group)
        gather.start()
        if pending is not None:
            pending.finish()
        pending = gather
    if pending is not None:
        pending.finish()


class ParameterGather:
    """Gathers the shards of some parameters into the parameters, which every worker holds whole."""

    def __init__(self, members: Sequence[DividedParameter], group: WorkerGroup) -> None:
        self._members = members
        self._group = group
        self._shards = ShardGroup(tuple(member.layout for member in members), group.size)

    def start(self) -> None:
        """Begin to gather."""
        first = self._members[0]
        device = first.parameter.device
        chunk = self._shards.join_shards([copy_to_device(member.shard.detach(), device) for member in self._members])
        self._in_place = self._shards.is_one_memory and first.has_ranges
        self._flat = (
            first.layout.flatten(first.parameter.detach())
            if self._in_place
            else chunk.new_empty(self._shards.flat_size)
        )
        self._work = start_all_gather(self._flat, chunk, among=self._group)

    def finish(self) -> None:
        """Wait, and copy what has not been gathered into place."""
        if self._work is not None:
            self._work.wait()
        wholes = [member.parameter for member in self._members]
        with torch.no_grad():
            if not self._in_place:
                self._shards.copy_to_wholes(self._flat, [whole.detach() for whole in wholes])
            for whole in wholes:
                torch.autograd.graph.increment_version(whole)


def group_by_kind(members: Sequence[DividedParameter]) -> list[list[DividedParameter]]:
    """Group parameters of one dtype and device, up to a size."""
    return group_in_order(
        members,
        kind=lambda member: (member.parameter.dtype, member.parameter.device),
        size=lambda member: member.parameter.numel() * member.parameter.element_size(),
        limit=lambda _member, _groups: GATHER_BYTES,
    )

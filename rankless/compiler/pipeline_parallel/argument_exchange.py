"""Give workers along the axis `expert` their rows of each microbatch.

Note [arguments of microbatches]: a loader divides a batch along `data`, and what that leaves along `expert`. A pipeline
divides it along `data`, then into microbatches, and each of these along `expert`. So a worker has other rows of
arguments than it needs. Before all units the workers along `expert` gather the arguments that their stages take, and
each takes its rows of each microbatch. Arguments are small against what layers compute from them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from rankless.collectives.mesh_collectives import all_gather
from rankless.compiler.ir.logical_program import LogicalProgram, LogicalValue
from rankless.compiler.ir.memory_order import find_memory_order, order_memory
from rankless.compiler.pipeline_parallel.microbatches import find_time_number
from rankless.compiler.pipeline_parallel.options import PipelineOptions
from rankless.compiler.sharding.redistribute import CollectiveRecord, count_bytes, replace_placement
from rankless.parallel.mesh import Mesh, MeshAxis, find_axis
from rankless.parallel.tensor_placement import Shard, Sharding, split_lengths


@dataclass(frozen=True, kw_only=True)
class ArgumentExchange:
    """A gather of an argument along the axis `expert`.

    Attributes:
        axis (MeshAxis): The axis.
        held (Shard): What each worker has before.
        order (tuple[int, ...] | None): The order of its dims in memory; None if it is contiguous.
        record (CollectiveRecord): What `rankless plan` shows.
    """

    axis: MeshAxis
    held: Shard
    order: tuple[int, ...] | None
    record: CollectiveRecord

    def run(self, value: Tensor) -> Tensor:
        """Return the rows of all workers along the axis."""
        whole = all_gather(value, among=self.axis, dim=self.held.dim, lengths=self.held.lengths)
        return whole if self.order is None else order_memory(whole, self.order)


def make_exchanges(program: LogicalProgram, options: PipelineOptions, mesh: Mesh) -> Mapping[int, ArgumentExchange]:
    """Return the gather of each tensor argument that needs one, by its number."""
    axis = find_axis(mesh, "expert")
    found = {}
    for node, described in program.inputs.items():
        held = options.exchanged[described.index] if described.kind == "argument" and options.exchanged else None
        if held is not None and axis is not None:
            value: LogicalValue = node.meta["val"]
            order = find_memory_order(list(map(int, value.shape)), list(map(int, value.strides)))
            record = describe_exchange(described.name, node, axis)
            found[described.index] = ArgumentExchange(axis=axis, held=held, order=order, record=record)
    return found


def describe_exchange(name: str, node: fx.Node, axis: MeshAxis) -> CollectiveRecord:
    """Return the record of a gather of an argument."""
    size = count_bytes(node)
    return CollectiveRecord(
        kind="all_gather",
        purpose="input",
        value=name,
        bytes=size,
        sent_bytes=size * (axis.size - 1) // axis.size,
        line=str(node.meta.get("line", "")),
        reason="rows of each microbatch",
        axis=axis.name,
    )


def divide_microbatch(
    shardings: Sequence[Sharding], exchanged: Sequence[Shard | None], inner: Mesh, number: int
) -> tuple[Sharding, ...]:
    """Return the shardings of the arguments of one microbatch: the axis `expert` divides its rows.

    Args:
        shardings: Those along the axes of a microbatch.
        exchanged: How the workers along `expert` hold each argument that microbatches divide outside of this axis.
        inner: The mesh of one microbatch.
        number: The microbatch.
    """
    time, axis = find_time_number(inner.axes), find_axis(inner, "expert")
    if axis is None or not any(exchanged):
        return tuple(shardings)
    place = inner.axes.index(axis)
    found = []
    for sharding, held in zip(shardings, exchanged, strict=True):
        rows = sharding[time]
        if held is not None and isinstance(rows, Shard):
            own = Shard(held.dim, split_lengths(rows.lengths[number], axis.size))
            sharding = replace_placement(sharding, place, own)
        found.append(sharding)
    return tuple(found)

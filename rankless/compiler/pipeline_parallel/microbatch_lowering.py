"""Lower a program for each microbatch: microbatches are ranks along an axis in time.

Note [microbatches]: the axis `microbatch` divides the batch as a data axis does, after all data axes, and before the
axes `expert`, `sequence` and `tensor`. Its ranks are run one after another by the same process. So the rules of
operators hold as they stand: what is a partial sum along the axis is accumulated, and what needs a whole value waits
for all microbatches. The axis `expert` divides each microbatch, so that its samples can move between the workers along
that axis; see Note [arguments of microbatches].

Note [absent values of microbatches]: of a value that one rank along the axis `expert` has, the others have a tensor
without rows. All of them must run collectives in the same units, so an absent value takes what the present one is
computed from, and microbatches are joined where the others join theirs.

Note [arguments of microbatches]: a loader divides a batch along `data`, and what that leaves along `expert`. A pipeline
divides it along `data`, then into microbatches, and each of these along `expert`. So a worker has other rows of
arguments than it needs. Before all units the workers along `expert` gather the arguments that their stages take, and
each takes its rows of each microbatch. Arguments are small against what layers compute from them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from rankless.collectives.mesh_collectives import all_gather
from rankless.compiler.ir import local_kernels, vocabulary_kernels
from rankless.compiler.ir.logical_program import LogicalProgram, LogicalValue
from rankless.compiler.ir.memory_order import find_memory_order, order_memory
from rankless.compiler.lowering.local_graph import LocalGraph, find_local
from rankless.compiler.lowering.lower import LoweringPass
from rankless.compiler.lowering.recomputation import (
    Recomputation,
    Region,
    choose_regions,
    count_own_bytes,
    gather_again,
    recompute,
)
from rankless.compiler.pipeline_parallel.stages import Stages, find_free
from rankless.compiler.rules.extension_operators import has_effects
from rankless.compiler.rules.half_precision import ACCUMULATED_IN
from rankless.compiler.rules.losses import find_class_range, finish_losses, lower_loss_terms
from rankless.compiler.rules.strategy import LocalValue, Strategy
from rankless.compiler.sharding.redistribute import (
    Collective,
    CollectivePurpose,
    CollectiveRecord,
    Redistribution,
    count_bytes,
    replace_placement,
)
from rankless.compiler.sharding.sharding_propagation import ShardedProgram
from rankless.parallel.mesh import Mesh, MeshAxis, find_axis
from rankless.parallel.tensor_placement import (
    Partial,
    Replicate,
    Shard,
    Sharding,
    compute_local_shape,
    remove_owners,
    split_lengths,
)

MICROBATCH = "microbatch"
INNER_ROLES = ("expert", "sequence", "tensor")
"""The roles of the axes after the one in time."""
LOSSES = (torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss2d_forward.default)
"""Losses that return a sum, and the weight of all targets."""


class MicrobatchLowering(LoweringPass):
    """Lowers a program for one microbatch. Each node knows which logical operator it belongs to."""

    def __init__(self, sharded: ShardedProgram, mesh: Mesh, stages: Stages) -> None:
        super().__init__(sharded, mesh)
        self._stages = stages
        self._free = find_free(sharded.logical)
        self._moves = False
        self._time = find_time_number(mesh.axes)

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Add a node with the logical operator that needs it, and whether it only moves a value."""
        node = super().call(target, *args, **kwargs)
        node.meta.update(source=self.current_node, moves=self._moves)
        return node

    @property
    def early_masks(self) -> frozenset[fx.Node]:
        """Masks that all workers have before the units, and so the numbers of rows of all microbatches."""
        return self._free

    def find_stage(self, node: fx.Node) -> int:
        """Return the stage of an operator, the first one for an input of the program."""
        return self._stages.of.get(node, 0)

    def redistribute(
        self, node: fx.Node, target: Sharding, reason: str, *, purpose: CollectivePurpose = "input"
    ) -> fx.Node:
        """Sum over the microbatches before anything is sent, so that it is sent once."""
        time = self._time
        if target not in self.values[node]:
            for source in list(self.values[node]):
                if isinstance(source[time], Partial) and isinstance(target[time], Replicate):
                    summed = replace_placement(source, time, target[time])
                    super().redistribute(node, summed, reason, purpose=purpose)
        return super().redistribute(node, target, reason, purpose=purpose)

    def all_reduce(self, value: fx.Node, reason: str, size: int) -> fx.Node:
        """Add a sum over the ranks along the current axes, first over the microbatches."""
        self.current_axes = sorted(self.current_axes, key=lambda number: number != self._time)
        return super().all_reduce(value, reason, size)

    def apply_strategies(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LocalValue:
        """Add an operator. A loss takes its number of targets from the targets alone.

        One with an effect that all microbatches have in common is run once, so no microbatch is the one that runs it.
        """
        strategies = self.sharded.strategies(node)
        if has_effects(node.target) and is_common(strategies[self._time]):
            return self.call(find_local(node.target), *args, **kwargs)
        if node.target not in LOSSES or not isinstance(strategies[self._time].outputs[0], Partial):
            return super().apply_strategies(node, args, kwargs)
        call, dtype = self.make_call(node, self._time), node.meta["val"][1].dtype
        self.current_axes = [number for number, item in enumerate(strategies) if item.lower is not None]
        loss = self.call(getitem, lower_loss_terms(self, call, args), 0)
        classes, wide = find_class_range(self, call, 0), ACCUMULATED_IN.get(dtype, dtype)
        total = self.call(vocabulary_kernels.weigh_own_targets, args[1], args[2], classes, wide)
        result = finish_losses(self, call, loss, total)
        self.current_axes = ()
        return result

    def add_step(
        self, node: fx.Node, source: Sharding, target: Sharding, reason: str, purpose: CollectivePurpose
    ) -> fx.Node:
        """Add nodes that move a value, and note its sharding."""
        self._moves = True
        local = super().add_step(node, source, target, reason, purpose)
        self._moves = False
        local.meta.setdefault("value", (node, target))
        return local

    def add_absent_step(self, node: fx.Node, source: Sharding, wanted: Sharding) -> fx.Node:
        """Add what this worker holds in place of a value that others move. All join microbatches at the same place."""
        before, after = source[self._time], wanted[self._time]
        if before == after or isinstance(before, Replicate):
            return super().add_absent_step(node, source, wanted)
        return self.call(Redistribution(self.axes[self._time], before, after), self.values[node][source])

    def add_absent(self, value: LogicalValue, sharding: Sharding, inputs: Sequence[Any]) -> fx.Node:
        """Add what this worker holds in place of a value of another one; see Note [absent values of microbatches]."""
        whole = [item for item in inputs if isinstance(item, fx.Node)]
        shape = compute_local_shape(value.shape, sharding, self.ranks)
        present = compute_local_shape(value.shape, remove_owners(sharding), self.ranks)
        return self.call(local_kernels.make_empty_from, whole, shape, present, value.dtype, value.device)

    def add_counter_draw(self, node: fx.Node, target: Sharding) -> fx.Node:
        """Add the draw of a microbatch's part of a value, and note its sharding."""
        local = super().add_counter_draw(node, target)
        local.meta["value"] = node, target
        return local

    def store(self, node: fx.Node, local: fx.Node, computed_by: fx.Node) -> None:
        """Keep a local value, and note its sharding."""
        super().store(node, local, computed_by)
        local.meta.setdefault("value", (node, self.sharded.sharding(node)))


@dataclass(frozen=True)
class RecomputationInStages(Recomputation):
    """Which values are computed again in a pipeline: none that a later stage needs, whose backward pass comes first."""

    stages: Mapping[fx.Node, int]

    def is_repeated(self, node: fx.Node) -> bool:
        """Return whether the backward pass of the same stage computes a value again, if it needs it."""
        if any(self.stages.get(user, 0) > self.stages.get(node, 0) for user in node.users):
            return False
        return super().is_repeated(node)


def add_microbatch_axis(mesh: Mesh, rank: int, count: int) -> Mesh:
    """Return the mesh of one microbatch: the axes of a mesh without its pipeline, and the axis in time."""
    time = MeshAxis(name=MICROBATCH, role="data", rank=rank, size=count)
    axes = [axis for axis in mesh.axes if axis.role != "pipeline"]
    number = next((number for number, axis in enumerate(axes) if axis.role in INNER_ROLES), len(axes))
    return replace(mesh, axes=(*axes[:number], time, *axes[number:]))


def find_time_number(axes: Sequence[MeshAxis]) -> int:
    """Return the place of the axis in time among the axes of one microbatch."""
    return next(number for number, axis in enumerate(axes) if axis.name == MICROBATCH)


def lower_microbatches(programs: Sequence[ShardedProgram], mesh: Mesh, stages: Stages) -> list[LocalGraph]:
    """Return the local graph of each microbatch. They have the same nodes.

    Args:
        programs: The program of each microbatch, with the shardings along the axes of one microbatch.
    """
    graphs: list[LocalGraph] = []
    repeated: dict[str, Region] = {}
    for number, sharded in enumerate(programs):
        inner = add_microbatch_axis(mesh, number, len(programs))
        lowering = MicrobatchLowering(sharded, inner, stages)
        local = lowering.lower_graph()
        for node, (placeholder, _) in zip(sharded.logical.inputs, local.inputs, strict=True):
            placeholder.meta["value"] = node, sharded.sharding(node)
        gather_again(local.graph, sharded, inner)
        if not graphs:  # the first microbatch decides for all: they may differ in size
            size_of = partial(count_own_bytes, sharded=sharded, ranks=lowering.ranks)
            chosen = choose_regions(local.graph, sharded.logical.recompute, size_of)
            repeated = {node.name: region for node, region in chosen.regions.items()}
        regions = {node: repeated[node.name] for node in local.graph.nodes if node.name in repeated}
        recompute(local.graph, RecomputationInStages(regions, find_local_stages(local.graph, stages)))
        graphs.append(local)
    names = [[node.name for node in local.graph.nodes] for local in graphs]
    assert all(other == names[0] for other in names), "microbatches have different programs"
    return graphs


def is_common(strategy: Strategy) -> bool:
    """Return whether all ranks along an axis have all inputs of an operator whole."""
    return all(isinstance(placement, Replicate) for placement in strategy.inputs)


def find_local_stages(graph: fx.Graph, stages: Stages) -> dict[fx.Node, int]:
    """Return the stage of each node of a microbatch's graph. A value that is moved stays where it is."""
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            inputs = [found[item] for item in node.all_input_nodes if item in found]
            moves = node.meta["moves"] and inputs
            found[node] = inputs[0] if moves else stages.of.get(node.meta["source"], stages.count - 1)
    return found


def is_join(node: fx.Node) -> bool:
    """Return whether a node needs all microbatches."""
    target = node.target
    return isinstance(target, Collective) and target.axis.name == MICROBATCH


@dataclass(frozen=True, kw_only=True)
class ArgumentExchange:
    """A gather of an argument along the axis `expert`.

    Attributes:
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


def make_exchanges(
    program: LogicalProgram, exchanged: Sequence[Shard | None], mesh: Mesh
) -> Mapping[int, ArgumentExchange]:
    """Return the gather of each tensor argument that needs one, by its number."""
    axis = find_axis(mesh, "expert")
    found = {}
    for node, described in program.inputs.items():
        held = exchanged[described.index] if described.kind == "argument" and exchanged else None
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
        exchanged: How the workers along `expert` hold each argument that microbatches divide outside of this axis.
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

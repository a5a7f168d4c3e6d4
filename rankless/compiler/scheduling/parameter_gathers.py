"""Gather parameters that are stored in pieces just before their use, and free them after it.

Note [gathers of parameters]: each use of a parameter needs the whole value. Uses that are close together share one
gather. If the program uses more than a group's bytes of other parameters in between, as between forward and backward,
it gathers again, and the memory is free meanwhile. Views and casts of a parameter are computed again too, because they
keep or copy its memory. Parameters whose uses begin close together are gathered in one group. A group's gather starts
when the group before it is first used, so that it overlaps with computation.

This is what FSDP does for modules that a script names (Zhao et al., VLDB 2023), as a pass over the local graph.

Results that lie in memory of parameters which workers share are copied, because the next step changes it. A gathered
parameter is fresh in each call, and a program that returns it may as well return its memory. Shared memory of
parameters must not leave the program; see Note [shards in one memory]. Gradients have memory of their own already.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import getitem
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from rankless.collectives.mesh_collectives import start_all_gather
from rankless.compiler.ir.logical_program import LogicalProgram, LogicalValue, is_fresh
from rankless.compiler.lowering.local_graph import LocalGraph
from rankless.compiler.scheduling.gradient_buckets_and_state_storage import StateStorage, limit_group
from rankless.compiler.sharding.redistribute import CollectiveRecord
from rankless.ownership.host_device_copies import copy_to_device
from rankless.ownership.shard_layout import ShardGroup, ShardLayout, group_in_order
from rankless.parallel.mesh import MeshAxis

aten = torch.ops.aten

RECOMPUTED = (aten.reshape.default, aten._to_copy.default)
"""Operators besides views that are computed again after a second gather."""

StartedGather = tuple[Tensor, Tensor, dist.Work | None]


class GatherOfParameters:
    """One gather of a group of parameters to a device, as two nodes of a local program."""

    def __init__(self, axis: MeshAxis, pieces: ShardGroup, device: torch.device) -> None:
        self._axis = axis
        self._pieces = pieces
        self._device = device

    def start(self, *pieces: Tensor) -> StartedGather:
        """Begin to gather this worker's pieces, which may lie on the host, and those of the others."""
        chunk = self._pieces.join_shards([copy_to_device(piece, self._device) for piece in pieces])
        flat = chunk.new_empty(self._pieces.flat_size)
        return flat, chunk, start_all_gather(flat, chunk, among=self._axis)

    def finish(self, started: StartedGather) -> list[Tensor]:
        """Wait, and return the whole parameters."""
        flat, _, work = started
        if work is not None:
            work.wait()
        return self._pieces.split_wholes(flat)


@dataclass(frozen=True)
class ParameterUse:
    """A use of a stored parameter by a node, through views and casts."""

    parameter: fx.Node
    value: fx.Node
    """What the node takes: the parameter, or the last of its views."""
    user: fx.Node
    position: int
    """The user's place in the graph."""


@dataclass
class GatheredValue:
    """Uses of a parameter that share one gather."""

    parameter: fx.Node
    uses: list[ParameterUse] = field(default_factory=list)

    @property
    def position(self) -> int:
        """The place of the first use."""
        return self.uses[0].position


def gather_parameters(local: LocalGraph, program: LogicalProgram, storage: StateStorage) -> LocalGraph:
    """Return a local graph whose stored parameters are inputs in pieces; see Note [gathers of parameters]."""
    shapes = {described.name: node.meta["val"] for node, described in program.inputs.items()}
    layouts = {
        node: storage.make_layout(described.name, shapes[described.name], storage.values[described.name])
        for node, described in local.inputs
        if described.kind in ("parameter", "buffer") and described.name in storage.values
    }
    if not layouts or storage.axis is None:
        return local
    values = {node: shapes[described.name] for node, described in local.inputs if node in layouts}
    sizes = {node: count_bytes(value) for node, value in values.items()}
    limit = limit_group(list(sizes.values()))
    gathered = share_gathers(list_uses(local.graph, layouts), sizes, limit)
    shared = {
        node: storage.shared[item.name]
        for node, item in local.inputs
        if node in layouts and item.name in storage.shared
    }
    groups = group_values([item for item in gathered if item.parameter not in shared], values, sizes, limit)
    add_gathers(local.graph, groups, layouts, values, storage.axis)
    for item in gathered:
        if item.parameter in shared:  # it lies whole in the memory of all workers: nothing is sent
            use_whole(local.graph, item, item.parameter)
    remove_unused(local.graph)
    copy_shared_results(local, shared)
    output: Any = local.graph.output_node()
    outputs = tuple((node, described) for node, (_, described) in zip(output.args[0], local.outputs, strict=True))
    return LocalGraph(
        graph=local.graph, inputs=local.inputs, outputs=outputs, pending_gradients=local.pending_gradients
    )


def count_bytes(value: LogicalValue) -> int:
    """Return the size of a parameter."""
    return value.numel() * value.element_size()


def list_uses(graph: fx.Graph, layouts: dict[fx.Node, ShardLayout]) -> list[ParameterUse]:
    """Return all uses of stored parameters in the order of the graph."""
    positions = {node: place for place, node in enumerate(graph.nodes)}
    uses = []
    for parameter in layouts:
        pending = [parameter]
        while pending:
            value = pending.pop()
            for user in value.users:
                if is_recomputed(user):
                    pending.append(user)
                else:
                    uses.append(ParameterUse(parameter, value, user, positions[user]))
    return sorted(uses, key=lambda use: use.position)


def is_recomputed(node: fx.Node) -> bool:
    """Return whether a node is a view or a cast of its only input."""
    if len(node.all_input_nodes) != 1 or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if len(node.target._schema.returns) != 1 or node.target._schema.is_mutable:
        return False
    return node.target in RECOMPUTED or not is_fresh(node)


def share_gathers(uses: Sequence[ParameterUse], sizes: dict[fx.Node, int], limit: int) -> list[GatheredValue]:
    """Return the gathers that uses share: at most `limit` bytes of other parameters are used between two of them."""
    found: list[GatheredValue] = []
    current: dict[fx.Node, GatheredValue] = {}
    last: dict[fx.Node, int] = {}
    for number, use in enumerate(uses):
        parameter = use.parameter
        known = current.get(parameter)
        if known is not None:
            between = {other.parameter for other in uses[last[parameter] + 1 : number]} - {parameter}
            if sum(sizes[other] for other in between) > limit:
                known = None
        if known is None:
            known = current[parameter] = GatheredValue(parameter)
            found.append(known)
        known.uses.append(use)
        last[parameter] = number
    return found


def group_values(
    gathered: Sequence[GatheredValue], values: dict[fx.Node, LogicalValue], sizes: dict[fx.Node, int], limit: int
) -> list[list[GatheredValue]]:
    """Group gathers in the order of their first uses, by dtype, device and limited size."""
    return group_in_order(
        gathered,
        kind=lambda item: (values[item.parameter].dtype, values[item.parameter].device),
        size=lambda item: sizes[item.parameter],
        limit=lambda _item, _groups: limit,
    )


def add_gathers(
    graph: fx.Graph,
    groups: Sequence[Sequence[GatheredValue]],
    layouts: dict[fx.Node, ShardLayout],
    values: dict[fx.Node, LogicalValue],
    axis: MeshAxis,
) -> None:
    """Add the gathers of all groups, and let the uses take what they gather."""
    nodes = list(graph.nodes)
    first = next(node for node in nodes if node.op != "placeholder")
    before_first = [nodes[group[0].position] for group in groups]
    for number, group in enumerate(groups):
        pieces = ShardGroup(tuple(layouts[item.parameter] for item in group), axis.size)
        gather = GatherOfParameters(axis, pieces, values[group[0].parameter].device)
        with graph.inserting_before(first if number == 0 else before_first[number - 1]):
            started = graph.call_function(gather.start, tuple(item.parameter for item in group))
        size = sum(prod(layout.shape) for layout in pieces.layouts) * values[group[0].parameter].element_size()
        started.meta["collective"] = describe_gather(group, size, axis)
        with graph.inserting_before(before_first[number]):
            finished = graph.call_function(gather.finish, (started,))
            wholes = [graph.call_function(getitem, (finished, index)) for index in range(len(group))]
        for item, whole in zip(group, wholes, strict=True):
            whole.meta["described"] = item.parameter.meta.get("described", item.parameter.name)
            use_whole(graph, item, whole)


def remove_unused(graph: fx.Graph) -> None:
    """Remove the views and casts of whole parameters that the uses have taken by others."""
    for node in reversed(list(graph.nodes)):
        if is_recomputed(node) and not node.users:
            graph.erase_node(node)


def use_whole(graph: fx.Graph, item: GatheredValue, whole: fx.Node) -> None:
    """Let the uses of a parameter that share a gather take a whole value, through views and casts of their own."""
    made: dict[fx.Node, fx.Node] = {item.parameter: whole}
    for use in item.uses:
        chain = []
        value = use.value
        while value not in made:
            chain.append(value)
            (value,) = value.all_input_nodes
        for link in reversed(chain):
            with graph.inserting_before(use.user):
                made[link] = graph.node_copy(link, made.__getitem__)
        use.user.replace_input_with(use.value, made[use.value])


def describe_gather(group: Sequence[GatheredValue], size: int, axis: MeshAxis) -> CollectiveRecord:
    """Return the record of a group's gather, of so many bytes."""
    user: dict[str, Any] = group[0].uses[0].user.meta
    return CollectiveRecord(
        kind="all_gather",
        purpose="input",
        value=", ".join(str(item.parameter.meta.get("described", item.parameter.name)) for item in group),
        bytes=size,
        sent_bytes=size * (axis.size - 1) // axis.size,
        line=str(user.get("line", "")),
        reason=f"{len(group)} parameters held in pieces" if len(group) > 1 else "a parameter held in pieces",
        axis=axis.name,
        module=user.get("module"),
        backward=bool(user.get("backward")),
        overlapped=True,
    )


def copy_shared_results(local: LocalGraph, shared: Mapping[fx.Node, int]) -> None:
    """Let a local graph return copies of the results that lie in shared memory.

    Args:
        local: The graph, whose outputs change.
        shared: The inputs that lie in shared memory, and the number of the memory of each.
    """
    one_of_each = {memory: node for node, memory in shared.items()}
    output: Any = local.graph.output_node()
    values = list(output.args[0])
    places = [place for place, (_, described) in enumerate(local.outputs) if described.kind != "gradient"]
    if not one_of_each or not places:
        return
    with local.graph.inserting_before(output):
        results = [values[place] for place in places]
        copied = local.graph.call_function(copy_if_shared, (results, list(one_of_each.values())))
        for number, place in enumerate(places):
            values[place] = local.graph.call_function(getitem, (copied, number))
    output.args = (tuple(values),)


def copy_if_shared(results: list[Tensor], shared: list[Tensor]) -> list[Tensor]:
    """Return results, and copies of those that lie in the memory of one of some tensors."""
    memories = {item.untyped_storage().data_ptr() for item in shared}
    return [item if get_memory(item) not in memories else copy_with_strides(item) for item in results]


def get_memory(value: Tensor) -> int | None:
    """Return the address of a tensor's memory; None for a sparse one."""
    return value.untyped_storage().data_ptr() if value.layout is torch.strided else None


def copy_with_strides(value: Tensor) -> Tensor:
    """Return a copy in memory of its own, with the same strides even if they leave gaps or repeat elements."""
    if not value.numel():
        return value.clone()
    span = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.as_strided((span,), (1,)).clone().as_strided(value.shape, value.stride(), 0)

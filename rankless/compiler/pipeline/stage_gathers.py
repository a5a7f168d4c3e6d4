"""Gather the parameters of a stage that workers hold in pieces, once in a step.

Note [gathers in stages]: with zero="parameters" a worker has a piece of each parameter of its stage. The first part of
its step that uses a parameter gathers it, and returns the whole to those after it, in place of the piece. The whole is
freed after the last part that uses it. So a step sends each parameter once, whatever the number of microbatches, as
FSDP does that keeps parameters between forward and backward. Workers along the axis `data` run the same parts in the
same order, so they gather the same groups. A parameter that another stage uses too is sent there as a whole.
"""

from collections.abc import Sequence

from torch import fx

from rankless.compiler.ir.logical_program import LogicalValue
from rankless.compiler.pipeline.data_flow import DataFlow, Part, ValueKey
from rankless.compiler.pipeline.part_graphs import PartGraph
from rankless.compiler.scheduling.parameter_gathers import (
    GatheredValue,
    ParameterUse,
    add_gathers,
    count_bytes,
    group_values,
)
from rankless.compiler.scheduling.stored_states import StateStorage, limit_group
from rankless.ownership.piece_layout import PieceLayout


class StageGathers:
    """Adds the gathers of one worker to the parts of its step; see Note [gathers in stages].

    Args:
        data_flow: The values that parts take from each other.
        worker: The worker.
        parts: Its parts in the order in which they run, one for each unit.
        storage: Which parameters are stored in pieces.
    """

    def __init__(self, data_flow: DataFlow, worker: int, parts: Sequence[Part], storage: StateStorage) -> None:
        partition = data_flow.partition
        self._axis = storage.axis
        self._names: dict[str, str] = {}
        self._layouts: dict[str, PieceLayout] = {}
        self._values: dict[str, LogicalValue] = {}
        for local, described in partition.graphs[0].inputs:
            placement = storage.values.get(described.name)
            is_whole = described.name in storage.shared or data_flow.is_remote(local.name, worker)
            if placement is not None and not is_whole:
                value = local.meta["value"][0].meta["val"]
                self._names[local.name] = described.name
                self._layouts[local.name] = storage.make_layout(described.name, value, placement)
                self._values[local.name] = value
        self._last_part = {
            need.name: number for number, part in enumerate(parts) for need in data_flow.needs.get(part, ())
        }
        self._gathered: set[str] = set()
        self._added = 0

    def add(self, part: PartGraph, outputs: Sequence[fx.Node]) -> tuple[ValueKey, ...]:
        """Let the next part return its outputs, and gather what no part before it has gathered.

        Args:
            part: The part. This is called for all of them, in order.
            outputs: What it returns.

        Returns:
            What later parts use of what it gathers. The part returns it after the outputs.
        """
        new = [key for key in part.inputs if key.name in self._layouts and key.name not in self._gathered]
        kept = tuple(key for key in new if self._last_part[key.name] > self._added)
        self._added += 1
        part.graph.output((*outputs, *[part.inputs[key] for key in kept]))
        self._gathered.update(key.name for key in new)
        if new and self._axis is not None:
            self._add_gathers(part.graph, {part.inputs[key]: key.name for key in new})
        return kept

    def _add_gathers(self, graph: fx.Graph, names: dict[fx.Node, str]) -> None:
        """Gather inputs of a graph, which lie in it in pieces."""
        assert self._axis is not None
        values = {node: self._values[name] for node, name in names.items()}
        sizes = {node: count_bytes(value) for node, value in values.items()}
        positions = {node: place for place, node in enumerate(graph.nodes)}
        gathered = []
        for node, name in names.items():
            node.meta["described"] = self._names[name]
            users = sorted(node.users, key=positions.__getitem__)
            gathered.append(GatheredValue(node, [ParameterUse(node, node, user, positions[user]) for user in users]))
        gathered.sort(key=lambda item: item.position)
        limit = limit_group([count_bytes(value) for value in self._values.values()])
        layouts = {node: self._layouts[name] for node, name in names.items()}
        add_gathers(graph, group_values(gathered, values, sizes, limit), layouts, values, self._axis)

"""Build the local graph of each part of a pipeline's step from the programs of the microbatches."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from rankless.collectives.mesh_collectives import PendingShift
from rankless.compiler.ir import local_kernels
from rankless.compiler.ir.custom_ops import add_linear_weight, run_linear_weight
from rankless.compiler.pipeline_parallel.data_flow import DataFlow, Part, ValueKey
from rankless.compiler.pipeline_parallel.microbatch_lowering import is_join
from rankless.compiler.pipeline_parallel.node_phases import is_drawing
from rankless.compiler.pipeline_parallel.random_draws import OrderedDraw, RandomDraws
from rankless.compiler.pipeline_parallel.schedules import UNIT_KINDS
from rankless.compiler.pipeline_parallel.stage_value_streams import Streams
from rankless.compiler.rules.pattern import is_partial_sum
from rankless.compiler.sharding.redistribute import Redistribution, RingShift
from rankless.parallel.tensor_placement import Partial, Shard, is_absent

ADDING_VARIANTS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.mm.default: Tensor.addmm_,
    run_linear_weight: add_linear_weight,
}
"""Operators that compute most gradients, and their variants that add the result to a sum."""


class PartGraph:
    """Builds the graph of one part of a worker's step.

    Attributes:
        graph (fx.Graph): The graph.
        inputs (dict[ValueKey, fx.Node]): The values that it takes, after `streams` if it sends or receives.
    """

    def __init__(self, data_flow: DataFlow, worker: int, part: Part, draws: RandomDraws) -> None:
        self.graph = fx.Graph()
        self.inputs: dict[ValueKey, fx.Node] = {}
        self._data_flow = data_flow
        self._partition = data_flow.partition
        self._worker = worker
        self._part = part
        self._draws = draws
        self._made: dict[ValueKey, fx.Node] = {}
        self.streams: fx.Node | None = None
        if part.phase in ("prepare", "finish"):
            self.streams = self.graph.placeholder("streams")
        self._last_input = self.streams

    def get(self, key: ValueKey) -> fx.Node:
        """Return a value: computed here, received, or an input."""
        if key in self._made:
            return self._made[key]
        name = key.name
        if key.is_sum and self.streams is not None:
            node = self._add_sum(key)
        elif self._is_computed_here(key):
            node = self._add(self._partition.by_name[name], key.microbatch)
        elif self.streams is not None and self._is_received_here(key):
            source = self._data_flow.find_worker(name)
            node = self.call(Streams.receive, (self.streams, key, source))
        else:
            node = self._get_input(key)
        self._made[key] = node
        return node

    def _get_input(self, key: ValueKey) -> fx.Node:
        """Return an input, a new one unless the graph has it already."""
        if key not in self.inputs:
            # It comes after the inputs before it, and before all nodes that compute.
            graph, last = self.graph, self._last_input
            with graph.inserting_before() if last is None else graph.inserting_after(last):
                self._last_input = self.inputs[key] = graph.placeholder(f"input_{len(self.inputs)}")
        return self.inputs[key]

    def _add_sum(self, key: ValueKey) -> fx.Node:
        """Add the terms that workers have of a sum over microbatches; see Note [sums of several workers]."""
        terms = [
            self._get_input(key) if worker == self._worker else self.call(Streams.receive, (self.streams, key, worker))
            for worker in self._data_flow.list_sum_workers(key.name)
        ]
        return terms[0] if len(terms) == 1 else self.call(add_terms, (terms,))

    def _is_computed_here(self, key: ValueKey) -> bool:
        node = self._partition.by_name[key.name]
        phase = self._partition.phases[key.name]
        if key.is_sum or node.op == "placeholder":
            return False
        if phase == "free":  # any part computes it, but what needs all microbatches is there before the units
            return not is_join(node) or self._part.phase == "prepare"
        return self._data_flow.find_part(key.name) == self._part

    def _is_received_here(self, key: ValueKey) -> bool:
        phase = self._partition.phases[key.name]
        if phase in UNIT_KINDS or not self._data_flow.is_remote(key.name, self._worker):
            return False
        return phase in ("input", "prepare") if self._part.phase == "prepare" else phase == "finish"

    def send(self, key: ValueKey, target: int) -> None:
        """Send a value to another worker; of a sum over microbatches the term of this worker."""
        value = self._get_input(key) if key.is_sum else self.get(key)
        sent = self.call(Streams.send, (self.streams, value, target, self._data_flow.describe(key)))
        meta = self._partition.by_name[key.name].meta
        logical = meta["value"][0] if "value" in meta else meta["source"]
        sent.meta.update(line=logical.meta.get("line", ""), module=logical.meta.get("module"))

    def add_to_sum(self, name: str, microbatch: int) -> None:
        """Add a microbatch's term of a value to the sum of those before it, which becomes an input.

        The operator must have a variant that adds; see `ADDING_VARIANTS`.
        """
        node = self._partition.by_name[name]
        arguments, _ = self._list_arguments(node, microbatch)
        target = ADDING_VARIANTS[self._partition.copies[microbatch][name].target]
        self.call(target, (self.get(ValueKey(name, is_sum=True)), *arguments))

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
        """Add a call of a function."""
        node = self.graph.call_function(target)
        node.args, node.kwargs = args, kwargs or {}
        return node

    def _add(self, node: fx.Node, microbatch: int | None) -> fx.Node:
        """Add the copy of a node for a microbatch."""
        if is_join(node):
            return self._add_join(node, microbatch)
        copy = self._partition.copies[microbatch or 0][node.name]
        target = OrderedDraw(self._draws, node.name, copy.target).run_draw if is_drawing(node) else copy.target
        added = self.call(target, *self._list_arguments(node, microbatch))
        added.meta.update({name: value for name, value in copy.meta.items() if name not in ("value", "source")})
        return added

    def _list_arguments(self, node: fx.Node, microbatch: int | None) -> tuple[Any, Any]:
        """Return the arguments of the copy of a node for a microbatch."""
        copy = self._partition.copies[microbatch or 0][node.name]

        def find(value: fx.Node) -> fx.Node:
            return self.get(self._find_key(value, node, microbatch))

        args, kwargs = fx.node.map_arg((copy.args, copy.kwargs), find)
        return args, kwargs

    def note_draw(self, node: fx.Node) -> None:
        """Add a draw that advances the generator through a node."""
        target: Any = node.target
        self.call(OrderedDraw(self._draws, node.name, target).note_draw, *self._list_arguments(node, None))

    def _find_key(self, value: fx.Node, user: fx.Node, microbatch: int | None) -> ValueKey:
        name = value.name
        phase = self._partition.phases[name]
        if phase in UNIT_KINDS and self._partition.takes_sum_of(user, value):
            return ValueKey(name, is_sum=True)
        return ValueKey(name, None if self._data_flow.is_single(name) else microbatch or 0)

    def _add_join(self, node: fx.Node, microbatch: int | None) -> fx.Node:
        """Add what needs all microbatches."""
        value, target = node.args[0], node.target
        assert isinstance(value, fx.Node)
        if isinstance(target, RingShift):  # the microbatch before this one is the rank before
            before = ((microbatch or 0) - 1) % len(self._partition.graphs)
            return self.call(PendingShift, (self.get(self._find_key(value, node, before)),))
        key = self._find_key(value, node, microbatch)
        if key.is_sum or self._partition.is_summed[value.name]:
            whole = self.get(key)
        else:
            count = len(self._partition.graphs)
            keys = (
                [key] * count
                if self._data_flow.is_single(value.name)
                else [ValueKey(value.name, number) for number in range(count)]
            )
            whole = self.call(Join(target), ([self.get(item) for item in keys],))
        if isinstance(target, Redistribution) and isinstance(target.target, Shard):
            piece, number = target.target, microbatch or 0
            # If another rank along some axis has the value, this one has a tensor without rows.
            if not is_absent(node.meta["value"][1], [axis.rank for axis in self._partition.axes]):
                whole = self.call(
                    local_kernels.slice_dim, (whole, piece.dim, piece.start(number), piece.lengths[number])
                )
        return whole


class Join:
    """Joins the values of all microbatches, as a collective joins those of ranks."""

    def __init__(self, collective: Any) -> None:
        self._collective = collective
        self.__name__ = "join_microbatches"

    def __call__(self, values: Sequence[Tensor]) -> Tensor:
        """Return the whole value."""
        if not isinstance(self._collective, Redistribution):
            return torch.stack(list(values))
        source = self._collective.source
        if isinstance(source, Shard):
            return torch.cat(list(values), source.dim).contiguous()
        assert isinstance(source, Partial)
        if is_partial_sum(source):
            return add_terms(values)
        return local_kernels.reduce_extremum(torch.stack(list(values)), source.reduce_op)


def add_terms(values: Sequence[Tensor]) -> Tensor:
    """Return the sum of the terms of all microbatches."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def take_sum(value: Tensor) -> Tensor:
    """Return a value: a node of its own for what enters a graph."""
    return value

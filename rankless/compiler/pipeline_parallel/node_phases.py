"""Decide when and where each node of a program runs that is lowered for microbatches.

Note [phases]: a step has these phases. *prepare*: what is the same for all microbatches, such as casts of weights and
counts of targets, and what needs all microbatches of values that depend on arguments and random numbers alone, such as
samples in a random order. Values of arguments that Python reads are compared first, those of the model at the end,
when all workers have them. *forward* and *backward*:
units of one stage and one microbatch. *weights*: what the backward pass computes for gradients of parameters alone, if
the schedule has units for that. *finish*: what needs the sums over all microbatches, such as a job's result; and
what is linear in gradients of parameters, which is computed once, from sums. A value that needs all microbatches in the
middle of the model, as the statistics of batch norm, would stop the pipeline: it is refused.
"""

from collections.abc import Collection, Sequence
from operator import getitem
from typing import Any, Literal

import torch
from torch import Tensor, fx

from rankless.compiler.ir import counter_distributions, counter_operators, local_kernels
from rankless.compiler.ir.logical_program import LogicalProgram, format_operator, is_fresh
from rankless.compiler.lowering.local_graph import LocalGraph, find_local
from rankless.compiler.lowering.value_check import ValueCheck
from rankless.compiler.pipeline_parallel.microbatch_lowering import find_time_number, is_join
from rankless.compiler.pipeline_parallel.random_draws import draws_numbers
from rankless.compiler.pipeline_parallel.stages import Stages, list_forward
from rankless.compiler.rules.extension_operators import has_effects
from rankless.compiler.rules.pattern import is_partial_sum
from rankless.compiler.sharding.redistribute import Redistribution, RingShift, StackingAllGather
from rankless.compiler.sharding.sharding_propagation import ShardedProgram
from rankless.errors import CaptureError
from rankless.parallel.mesh import MeshAxis
from rankless.parallel.tensor_placement import Replicate, compute_local_shape

Phase = Literal["input", "free", "prepare", "forward", "backward", "weights", "finish"]
"""When a node runs. One that is "free" runs wherever its value is needed; see `stages.find_free`."""

KEYS = (counter_distributions.draw_key, counter_operators.draw_mask_key)
"""Functions that draw the key of a random operator: a number, which every worker draws for itself where it needs it."""
DRAWING = (local_kernels.draw_dropout_mask, local_kernels.draw_and_slice, *KEYS)
"""Functions of local programs that draw from a generator."""

WITHOUT = "use a mesh without the axis pipeline, or a run without heterogeneous workers"
ABSENT_INPUTS = (local_kernels.make_absent, local_kernels.make_zeros)
"""Functions that the workers without a value call where the one that has it uses it as it is."""


class ProgramPartition:
    """The phase and stage of each node; see Note [phases].

    Nodes have the same names in the programs of all microbatches.

    Args:
        graphs: The programs.
        axes: The axes of one microbatch.
        gathered: The names of parameters that a stage has in pieces: the same on all workers.

    Attributes:
        nodes (list[fx.Node]): The nodes of the first microbatch's program, in order.
        phases (dict[str, Phase]): The phase of each.
        stages (dict[str, int]): The stage of each but those that are free.
        is_invariant (dict[str, bool]): Whether a node has the same value for all microbatches.
        is_summed (dict[str, bool]): Whether it is computed from sums over microbatches and gives such a sum.
    """

    def __init__(
        self,
        graphs: Sequence[LocalGraph],
        sharded: ShardedProgram,
        stages: Stages,
        axes: Sequence[MeshAxis],
        gathered: Collection[str] = (),
    ) -> None:
        self.graphs = graphs
        self.axes = axes
        self._time = find_time_number(axes)
        self.program: LogicalProgram = sharded.logical
        self.copies = [{node.name: node for node in local.graph.nodes} for local in graphs]
        self.nodes = [node for node in graphs[0].graph.nodes if node.op != "output"]
        self.by_name = {node.name: node for node in self.nodes}
        self.count = stages.count
        self.phases: dict[str, Phase] = {}
        self.stages: dict[str, int] = {}
        self.is_invariant: dict[str, bool] = {}
        self.is_summed = dict.fromkeys(self.by_name, False)
        self._sharded = sharded
        self._logical_stages = stages
        self._forward = frozenset(list_forward(self.program))
        self._find_inputs()
        self._early = self._find_early()
        for node in self.nodes:
            if node.op != "placeholder":
                self._place(node)
        self._find_summed()
        self._delay_views(gathered)
        self._require_possible()

    def _find_inputs(self) -> None:
        """Place the inputs."""
        logical = [node for node in self.program.graph.nodes if node in self.program.inputs]
        for node, (local, described) in zip(logical, self.graphs[0].inputs, strict=True):
            name = local.name
            is_parameter = described.kind == "parameter"
            self.phases[name] = "input" if is_parameter else "free"
            if is_parameter:
                self.stages[name] = self._logical_stages.owners[described.name]
            self.is_invariant[name] = isinstance(self._sharded.sharding(node)[self._time], Replicate)

    def _find_early(self) -> frozenset[fx.Node]:
        """Return the joins of values that depend on no parameter, and what they need."""
        known: set[fx.Node] = set()
        for node in self.nodes:
            is_parameter = node.op == "placeholder" and self.phases[node.name] != "free"
            if not is_parameter and all(item in known for item in node.all_input_nodes):
                known.add(node)
        joins = [node for node in self.nodes if node in known and is_join(node)]
        return frozenset(item for node in joins for item in list_ancestors(node))

    def _place(self, node: fx.Node) -> None:
        """Give a node its phase and stage, after those before it."""
        inputs = [item.name for item in node.all_input_nodes]
        name, source = node.name, node.meta["source"]
        self.is_invariant[name] = (is_join(node) and not self._gives_pieces(node)) or self._is_same(node)
        # Workers compare values of the model after the step, once all have them: see `StepOutput.check`.
        is_late_check = isinstance(node.target, ValueCheck) and self.phases[inputs[0]] != "free"
        if is_late_check or (all(self.phases[item] == "free" for item in inputs) and not draws_values(node)):
            self.phases[name] = "free"
            return
        followed = [item for item in inputs if self.phases[item] in ("forward", "backward", "finish")]
        self.stages[name] = self._logical_stages.of.get(source, self._logical_stages.count - 1)
        if source in self.program.inputs and inputs and inputs[0] in self.stages:
            # A parameter is moved by the worker that has it.
            self.stages[name] = self.stages[inputs[0]]
        is_forward = source in self._forward and "repeats" not in node.meta
        self.phases[name] = "forward" if is_forward else "backward"
        if node.meta["moves"] and followed and "repeats" not in node.meta:
            # What moves a value runs where the value is, whatever the operator that needs it.
            self.stages[name], self.phases[name] = self.stages[followed[0]], self.phases[followed[0]]
        # An effect that all microbatches have in common happens once in a step.
        runs_once = has_effects(source.target) and self.is_invariant[name]
        if node in self._early:
            self.phases[name] = "prepare"
        elif is_join(node) or runs_once or any(self.phases[item] == "finish" for item in inputs):
            self.phases[name] = "finish"
        elif is_forward and self.is_invariant[name]:
            self.phases[name] = "prepare"

    def _delay_views(self, gathered: Collection[str]) -> None:
        """Let each unit view the parameters that its stage has in pieces, so that they are gathered when it needs them.

        What another stage takes is sent once for all microbatches, so it stays where it is.
        """
        known = {node for node, described in self.graphs[0].inputs if described.name in gathered}
        views = []
        for node in self.nodes:
            is_view = isinstance(node.target, torch._ops.OpOverload) and not is_fresh(node)
            if is_view and self.phases[node.name] == "prepare" and known.issuperset(node.all_input_nodes):
                known.add(node)
                views.append(node)
        for node in reversed(views):
            users = [user.name for user in node.users]
            places = {(self.phases.get(name), self.stages.get(name)) for name in users}
            stage = self.stages[node.name]
            if places and places <= {("forward", stage), ("backward", stage)}:
                self.phases[node.name] = "forward"

    @staticmethod
    def _gives_pieces(node: fx.Node) -> bool:
        """Return whether a join gives each microbatch a piece."""
        target = node.target
        return isinstance(target, RingShift) or (
            isinstance(target, Redistribution) and not isinstance(target.target, Replicate)
        )

    def _is_same(self, node: fx.Node) -> bool:
        """Return whether a node computes the same for all microbatches."""
        if is_join(node) or not all(self.is_invariant[item.name] for item in node.all_input_nodes):
            return False
        others = [copies[node.name] for copies in self.copies[1:]]
        return all(
            is_same_target(node.target, other.target)
            and is_same_argument(node.args, other.args)
            and is_same_argument(node.kwargs, other.kwargs)
            for other in others
        )

    def _find_summed(self) -> None:
        """Find what is linear in partial sums and used as such only: it is computed once, from the sums."""
        outputs = {node.name for node, _ in self.graphs[0].outputs}
        for node in reversed(self.nodes):
            if self.phases[node.name] != "backward" or not self._is_linear_in_sums(node):
                continue
            users = [user for user in node.users if user.op != "output"]
            if all(self.takes_sum(user) for user in users) and (users or node.name in outputs):
                self.is_summed[node.name] = True
                self.phases[node.name] = "finish"

    def _is_linear_in_sums(self, node: fx.Node) -> bool:
        if not self.is_partial(node):
            return False
        source = node.meta["source"]
        if node.target in ABSENT_INPUTS:
            return all(map(self.is_partial, node.all_input_nodes))
        if node.meta["moves"]:
            return False
        target = node.target
        if target is local_kernels.make_empty_from:  # see Note [absent values of microbatches]
            is_tuple = isinstance(source.meta["val"], tuple | list)
            target = getitem if is_tuple else find_local(source.target)
        if target is getitem or not isinstance(target, torch._ops.OpOverload):
            return False
        strategy = self._sharded.axes[self._time].strategies.get(source)
        if strategy is None or strategy.lower is not None:
            return False
        return all(self.is_partial(item) or self.is_invariant[item.name] for item in node.all_input_nodes)

    def takes_sum(self, user: fx.Node) -> bool:
        """Return whether a node takes sums over microbatches where its inputs are partial sums."""
        is_sum = isinstance(user.target, Redistribution) and is_join(user) and is_partial_sum(user.target.source)
        return is_sum or self.is_summed[user.name]

    def takes_sum_of(self, user: fx.Node, value: fx.Node) -> bool:
        """Return whether a node takes the sum of a value over microbatches."""
        return self.takes_sum(user) and self.is_partial(value)

    def is_partial(self, value: fx.Node) -> bool:
        """Return whether each microbatch has a term of a value."""
        known = value.meta.get("value")
        return known is not None and is_partial_sum(known[1][self._time])

    def compute_shape(self, value: fx.Node, microbatch: int) -> list[int]:
        """Return the shape of a value of a microbatch, on every worker of this one's pipeline."""
        logical, sharding = self.copies[microbatch][value.name].meta["value"]
        ranks = [microbatch if number == self._time else axis.rank for number, axis in enumerate(self.axes)]
        return compute_local_shape(logical.meta["val"].shape, sharding, ranks)

    def _require_possible(self) -> None:
        """Refuse what would stop the pipeline; see Note [phases]."""
        for node in self.nodes:
            for value in node.all_input_nodes:
                assert self._comes_before(value.name, node.name), f"{node} of an earlier unit takes {value}"
            is_once = self.is_summed[node.name] or self.is_invariant[node.name]
            if self.phases[node.name] != "finish" or is_once or self.is_partial(node):
                continue
            if node.meta["backward"] or node.meta["module"] is not None:
                self._refuse_stop(node)

    def split_weights(self) -> None:
        """Move what no other stage needs of the backward pass to units of its own."""
        needed: set[str] = set()
        for node in reversed(self.nodes):
            name = node.name
            if self.phases[name] != "backward":
                continue
            users = [user.name for user in node.users if user.op != "output" and self.phases[user.name] == "backward"]
            if any(user in needed or self.stages[user] != self.stages[name] for user in users):
                needed.add(name)
        for name, phase in self.phases.items():
            if phase == "backward" and name not in needed:
                self.phases[name] = "weights"

    def _refuse_stop(self, node: fx.Node) -> None:
        """Raise `CaptureError` for a node that needs a sum or a whole value in the middle of the model."""
        joins = [item for item in list_ancestors(node) if is_join(item) and self.phases[item.name] == "finish"]
        source = (joins[-1] if joins else node).meta["source"]
        module = source.meta.get("module")
        place = "" if module is None else f" of {module.path} ({module.kind})"
        operator = format_operator(source.target) if source.op == "call_function" else "a result"
        fix = "set random='counter' on the job" if draws_numbers(source) else ""
        is_loss = module is None or self._is_after_layers(source)
        if is_loss and not fix:
            fix = f"compute a loss that is a sum or a mean over samples, or {WITHOUT}"
        text = f"{operator}{place}, which needs the whole batch"
        refuse(node, f"the loss: {text}" if module is not None and is_loss else text, fix=fix)

    def _is_after_layers(self, source: fx.Node) -> bool:
        """Return whether no layer follows an operator of the forward pass; the scale of a loss is one number."""
        pending, found = [source], set[fx.Node]()
        while pending:
            node = pending.pop()
            if node in found or node not in self._forward:
                continue
            found.add(node)
            pending += node.users
            inputs = [item for item in node.all_input_nodes if item in self.program.inputs]
            if any(self.program.inputs[item].kind == "parameter" and item.meta["val"].numel() > 1 for item in inputs):
                return False
        return source in self._forward

    def _comes_before(self, value: str, user: str) -> bool:
        """Return whether a microbatch's value is there when its user runs in the order of stages."""
        phase = self.phases[user]
        if phase not in ("forward", "backward") or self.phases[value] not in ("forward", "backward", "finish"):
            return True
        if self.phases[value] != phase:
            return self.phases[value] == "forward"
        forward = self.stages[value] <= self.stages[user]
        return forward if phase == "forward" else self.stages[value] >= self.stages[user]

    def list_checks(self) -> list[fx.Node]:
        """Return the comparisons of values that Python reads which every worker can make before the units."""
        checks = [node for node in self.nodes if isinstance(node.target, ValueCheck)]
        return [node for node in checks if all(self.phases[item.name] == "free" for item in node.all_input_nodes)]

    def list_drawing(self) -> list[fx.Node]:
        """Return the nodes that draw random numbers, in the order of the script; see Note [draws of stages]."""
        found = [node for node in self.nodes if node.op == "call_function" and is_drawing(node)]
        for node in found:
            if not all(
                self.phases[item.name] == "free" and self.is_invariant[item.name] for item in node.all_input_nodes
            ):
                operator = format_operator(node.meta["source"].target)
                refuse(
                    node,
                    f"random numbers of {operator} that depend on values of the model",
                    fix="set random='counter' on the job",
                )
        return found


def list_ancestors(node: fx.Node) -> list[fx.Node]:
    """Return what a node depends on, the nearest last."""
    found: dict[fx.Node, None] = {}
    pending = [node]
    while pending:
        item = pending.pop()
        if item not in found:
            found[item] = None
            pending += item.all_input_nodes
    return list(reversed(found))


def refuse(node: fx.Node, found: str, fix: str = "") -> None:
    """Raise `CaptureError` for a node that cannot be part of a pipeline."""
    raise CaptureError(
        expected="a job that can be computed in microbatches, for a pipeline or heterogeneous workers",
        found=found,
        fix=fix or f"use layers that treat samples one by one, such as layer norm, or {WITHOUT}",
        where=node.meta.get("line") or None,
    )


def is_drawing(node: fx.Node) -> bool:
    """Return whether a local node draws random numbers."""
    return isinstance(node.target, local_kernels.DrawFrom) or node.target in DRAWING or draws_numbers(node)


def draws_values(node: fx.Node) -> bool:
    """Return whether a local node returns random numbers, of a generator or by counter."""
    if node.target in KEYS:
        return False
    return is_drawing(node) or node.target in (counter_distributions.draw, counter_operators.draw_mask)


def is_same_target(first: Any, second: Any) -> bool:
    """Return whether two nodes call the same function."""
    if isinstance(first, Redistribution) and isinstance(second, Redistribution):
        return (first.axis.name, first.source, first.target) == (second.axis.name, second.source, second.target)
    if isinstance(first, StackingAllGather) and isinstance(second, StackingAllGather):
        return bool(first.axis.name == second.axis.name)
    if isinstance(first, RingShift) and isinstance(second, RingShift):
        return (first.axis.name, first.placement) == (second.axis.name, second.placement)
    return bool(first == second)


def is_same_argument(first: Any, second: Any) -> bool:
    """Return whether two nodes have the same argument, where nodes are the same by name."""
    if type(first) is not type(second):
        return False
    if isinstance(first, fx.Node):
        return bool(first.name == second.name)
    if isinstance(first, tuple | list):
        return len(first) == len(second) and all(map(is_same_argument, first, second))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(is_same_argument(first[key], second[key]) for key in first)
    if isinstance(first, Tensor):
        return first is second
    return bool(first == second)

"""How a call runs on a rank's parts of its arguments: the plan of one signature.

Note [plans of calls]: a plan is one of three kinds.

- "direct": the function itself runs on the rank's parts, under PyTorch's autograd. That is right if its trace on the
  shapes of the parts is, operator by operator, the program that the rules make of its trace on the whole shapes.
- "generated": that program consists of PyTorch's operators without communication, but with other arguments, as the
  sizes of a view. It runs under PyTorch's autograd too: the chain rule gives the right gradients.
- "pair": anything else. The rules have lowered the gradients too, and both programs run in one autograd function.

A function that the rules cannot divide has no plan. It runs on whole values.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import getitem
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from rankless.compiler.ir import custom_ops
from rankless.compiler.ir.logical_program import LogicalValue
from rankless.compiler.ir.memory_order import find_memory_order
from rankless.compiler.local_program import generate_function
from rankless.compiler.lowering.local_graph import LocalGraph
from rankless.compiler.lowering.lower import LoweringPass
from rankless.compiler.rules.strategy import list_tensor_slots
from rankless.compiler.sharding.sharding_propagation import ShardedProgram, propagate_shardings
from rankless.compiler.tracing.symbolic_sizes import MIN_SYMBOLIC_SIZE, SymbolicSizes
from rankless.logical_view.redistribution import find_gradient_placement, put_among_zeros
from rankless.logical_view.second_gradients import GradientCall, find_draws, make_gradient_call, write_graph
from rankless.logical_view.trace_call_to_program import (
    CallArguments,
    ChangedArgument,
    ChangesArguments,
    PlainLeaf,
    ResultForm,
    TracedCall,
    trace_call,
)
from rankless.parallel.mesh import Mesh
from rankless.parallel.tensor_placement import Partial, Placement, Replicate, Shard, compute_local_shape

DIFFERENTIABLE = frozenset({custom_ops.run_linear, getitem})
"""Functions of local programs, besides PyTorch's operators, that PyTorch's autograd differentiates."""


OF_PART: Any = object()
"""Stands for an order in memory that the strides of each rank's part show."""


class CannotDivide(Exception):
    """The rules cannot divide a call. It runs on whole values."""


@dataclass(frozen=True, kw_only=True)
class LogicalCall:
    """A call of a function on logical values.

    Attributes:
        function: The function.
        modes: PyTorch's modes, on which its trace depends.
        arguments: Its arguments, with the logical shapes of tensors.
        placements: Those of the tensor arguments.
    """

    function: Callable[..., Any]
    modes: Any
    arguments: CallArguments
    placements: tuple[Placement, ...]


@dataclass(frozen=True, kw_only=True)
class CallPlan:
    """How a call runs on local tensors; see Note [plans of calls].

    Attributes:
        kind: The kind of plan.
        placements: Those of the tensors of the result, then of `changed`.
        shapes: Their logical shapes.
        orders: The orders of their dims in memory, where a part is too short to show it; else `OF_PART`.
        leaves: What the function returns: None for each tensor that is no argument.
        structure: What puts these together.
        changed: The tensor arguments, by number, that get new values. In a direct plan the function changes them.
        gathered: The tensor arguments, by number, that must be whole first.
        inputs: The tensor arguments that `forward` takes, by number.
        forward: Takes `inputs`, and returns results and new values; in a pair also what `backward` needs.
        backward: In a pair, takes what `forward` has kept and the gradients of `differentiated`.
        differentiated: The results whose gradients `backward` takes, in order.
        gradients: The tensor arguments whose gradients `backward` returns, in order.
        again: Computes these so that they can be differentiated again.
        layouts: Those of the results that are known, by number.
        text: Names the call, in the same words on all ranks.
        digest: That of the text.
    """

    kind: Literal["direct", "generated", "pair"]
    placements: tuple[Placement, ...]
    shapes: tuple[tuple[int, ...], ...]
    orders: tuple[Any, ...]
    leaves: tuple[ChangedArgument | PlainLeaf | None, ...]
    structure: pytree.TreeSpec
    changed: tuple[int, ...] = ()
    gathered: tuple[int, ...] = ()
    inputs: tuple[int, ...] = ()
    forward: Callable[..., Sequence[Any]] | None = None
    backward: Callable[..., Sequence[Any]] | None = None
    differentiated: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    again: GradientCall | None = None
    layouts: dict[int, Any] = field(default_factory=dict)
    text: str = ""
    digest: int = 0

    @cached_property
    def is_one_tensor(self) -> bool:
        """Whether the function returns one tensor, which is no argument."""
        return self.leaves == (None,) and self.structure.is_leaf()

    def run_forward(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run the forward program under PyTorch's autograd."""
        assert self.forward is not None, self.kind
        with torch._C._DisableAutocast():  # the trace has its casts
            return self.forward(*[tensors[place] for place in self.inputs])

    def run(self, tensors: Sequence[Tensor], differentiate: Callable[..., Sequence[Tensor]]) -> Sequence[Tensor]:
        """Return this rank's parts of the results and new values.

        Args:
            tensors: Its parts of all tensor arguments.
            differentiate: Returns gradients that can be differentiated again, from what `again` takes.
        """
        if self.kind == "generated":
            return self.run_forward(tensors)
        with torch._C._DisableAutocast():
            found: Sequence[Tensor] = ProgramPair.apply(self, differentiate, *tensors)  # type: ignore[no-untyped-call]
            return found


class ProgramPair(torch.autograd.Function):
    """The programs of a plan, forward and backward, as one function of autograd."""

    @staticmethod
    def forward(
        ctx: Any, plan: CallPlan, differentiate: Callable[..., Sequence[Tensor]], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Run the forward program, and keep what the backward program needs."""
        assert plan.forward is not None
        # Nothing is recorded below autograd. Some kernels, as the LSTM of MKL-DNN, keep what gradients need only if on.
        with torch._C._AutoDispatchBelowAutograd(), torch.set_grad_enabled(plan.backward is not None):
            found = plan.forward(*[tensors[place] for place in plan.inputs])
        results, kept = found[: len(plan.placements)], found[len(plan.placements) :]
        ctx.plan, ctx.differentiate, ctx.arguments = plan, differentiate, len(tensors)
        ctx.kept = [None if isinstance(value, Tensor) else value for value in kept]
        given_again = () if plan.again is None else (tensors[place] for place in plan.again.arguments)
        ctx.save_for_backward(*given_again, *(value for value in kept if isinstance(value, Tensor)))
        # A result that is an argument gets a tensor of its own, because autograd takes it for a change in place.
        given = {id(tensor) for tensor in tensors}
        results = tuple(value.view_as(value) if id(value) in given else value for value in results)
        constant = [value for place, value in enumerate(results) if place not in plan.differentiated]
        ctx.mark_non_differentiable(*constant)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the arguments."""
        again = ctx.plan.again
        if not torch.is_grad_enabled():
            return run_backward(ctx, *gradients)
        if again is None:
            found: tuple[Tensor | None, ...] = once_differentiable(run_backward)(ctx, *gradients)
            return found
        saved = ctx.saved_tensors
        kept = get_kept(ctx, saved)
        values = [*saved[: len(again.arguments)], *(kept[place] for place in again.kept)]
        return place_gradients(ctx, ctx.differentiate(values, [gradients[place] for place in ctx.plan.differentiated]))


def run_backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of a pair's arguments by its backward program."""
    plan: CallPlan = ctx.plan
    if plan.backward is None:
        return place_gradients(ctx, ())
    kept = get_kept(ctx, ctx.saved_tensors)  # a checkpoint computes it now
    with torch._C._AutoDispatchBelowAutograd():
        return place_gradients(ctx, plan.backward(*kept, *(gradients[place] for place in plan.differentiated)))


def get_kept(ctx: Any, saved: Sequence[Tensor]) -> list[Any]:
    """Return what the backward program of a pair takes from the forward pass, from its saved tensors."""
    tensors = iter(saved[0 if ctx.plan.again is None else len(ctx.plan.again.arguments) :])
    return [next(tensors) if value is None else value for value in ctx.kept]


def place_gradients(ctx: Any, computed: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Return the gradients of all arguments of a pair's function of autograd."""
    found: list[Tensor | None] = [None] * ctx.arguments
    for place, value in zip(ctx.plan.gradients, computed, strict=True):
        found[place] = value
    return None, None, *found


class CallLowering(LoweringPass):
    """Lowers the program of a call. Its results keep their placements."""

    def __init__(self, sharded: ShardedProgram, mesh: Mesh, targets: Sequence[Placement]) -> None:
        super().__init__(sharded, mesh)
        self.targets = targets

    def lower_outputs(self) -> tuple[list[Any], list[fx.Node]]:
        """Redistribute each output to its placement."""
        outputs = []
        for (node, described), target in zip(self.sharded.logical.outputs, self.targets, strict=True):
            self.current_node = node
            (placement,) = self.sharded.sharding(node)
            if isinstance(placement, Shard) and isinstance(target, Partial):
                local = self.redistribute(node, (placement,), described.name, purpose="output")
                shape, start = node.meta["val"].shape, placement.start(self.axes[0].rank)
                moved: fx.Node = self.call(put_among_zeros, local, shape, placement.dim, start)
            else:
                moved = self.redistribute(node, (target,), described.name, purpose="output")
            outputs.append((moved, described))
        return outputs, []


@dataclass(frozen=True, kw_only=True)
class LoweredCall:
    """A call's program for one rank, and the placements of its results and of the new values of arguments."""

    call: LogicalCall
    changed: tuple[int, ...]
    """The arguments whose new values are results."""
    traced: TracedCall
    local: LocalGraph
    draws: Mapping[fx.Node, tuple[Placement, fx.Node]]
    """Random numbers in `traced`: how they lie, and this rank's part."""
    given: tuple[Placement, ...]
    """The placements in which it takes the arguments."""
    gathered: tuple[int, ...]
    """The arguments that are whole there, and were not."""
    placements: tuple[Placement, ...]


def lower_call(call: LogicalCall, mesh: Mesh, sizes: SymbolicSizes | None = None) -> "ProgramParts":
    """Return the program of a call for the rank of a mesh, divided where the backward pass begins.

    Args:
        call: The call.
        mesh: The ranks. It has one axis.
        sizes: Created the symbols in the call, if there are any.

    Raises:
        CannotDivide: The call must run on whole values.
    """
    try:
        try:
            changed: tuple[int, ...] = ()
            lowered = lower_changing_call(call, changed, mesh, sizes)
        except ChangesArguments as found:
            changed = found.numbers
            lowered = lower_changing_call(call, changed, mesh, sizes)
        parts = split_program(lowered)
        if lowered.traced.lacks_gradients and not parts.is_differentiable:
            parts = split_program(lower_changing_call(call, changed, mesh, sizes, form="copies"))
        return parts
    except Exception as error:  # foreign code ran: PyTorch raises its own errors, of many types, in a trace
        raise CannotDivide from error


def lower_changing_call(
    call: LogicalCall,
    changed: tuple[int, ...],
    mesh: Mesh,
    sizes: SymbolicSizes | None,
    *,
    form: ResultForm = "own",
) -> LoweredCall:
    """Return the program of a call; `changed` are arguments whose new values are results."""
    traced = trace_call(call.function, call.arguments, changed, sizes, form=form)
    placements = call.placements
    given = find_taken_placements(traced, placements, mesh)
    # How results lie does not depend on their gradients.
    first = propagate(traced, given, {}, mesh)
    results, values = traced.find_outputs("result"), traced.find_outputs("changed argument")
    found = {number: settle(first.sharding(node)[0]) for number, node in results.items()}
    changes = {number: place_change(traced, number, node, placements[number], first) for number, node in values.items()}
    after = [found[number] for number in sorted(found)] + list(changes.values())
    gradients = {number: find_gradient_placement(after[number]) for number in traced.differentiated}
    targets = [
        found[number]
        if role == "result"
        else changes[number]
        if role == "changed argument"
        else find_gradient_placement(given[number])
        for role, number in traced.roles
    ]
    lowering = CallLowering(propagate(traced, given, gradients, mesh), mesh, targets)
    local = lowering.lower_graph()
    return LoweredCall(
        call=call,
        changed=changed,
        traced=traced,
        local=local,
        draws={
            node: (sharding[0], part)
            for node in find_draws(traced)
            for sharding, part in list(lowering.values[node].items())[:1]
        },
        given=tuple(given),
        gathered=tuple(number for number, item in enumerate(placements) if item != given[number]),
        placements=tuple(after),
    )


def make_plan(parts: "ProgramParts", symbols: Sequence[str] = ()) -> CallPlan:
    """Return the plan of a call: a pair, or what PyTorch's autograd differentiates.

    Args:
        parts: The program of the call.
        symbols: The names of the symbols in it. The programs of the plan take their numbers first.
    """
    lowered = parts.lowered
    plan = CallPlan(
        kind="generated",
        placements=lowered.placements,
        shapes=list_shapes(lowered.traced, lowered.changed),
        orders=list_orders(lowered),
        leaves=lowered.traced.result_leaves,
        structure=lowered.traced.result_structure,
        changed=lowered.changed,
        gathered=lowered.gathered,
        inputs=tuple(described.index for _, described in lowered.local.inputs if is_argument(described)),
    )
    if parts.is_differentiable:
        return replace(plan, forward=generate_function(parts.write(parts.results), symbols))
    return add_programs(plan, parts, symbols)


def propagate(
    traced: TracedCall, given: Sequence[Placement], gradients: Mapping[int, Placement], mesh: Mesh
) -> ShardedProgram:
    """Return the sharded program of a call, for placements of arguments and of gradients of results.

    Gradients without a placement are whole.
    """
    placements = [*given, *(gradients.get(number, Replicate()) for number in traced.differentiated)]
    return propagate_shardings(traced.program, [(item,) for item in placements], [axis.size for axis in mesh.axes])


def find_taken_placements(traced: TracedCall, placements: Sequence[Placement], mesh: Mesh) -> list[Placement]:
    """Return the placements in which a call takes its arguments: as they lie, or whole if an operator needs that."""
    taken = list(placements)
    while True:
        sharded = propagate(traced, taken, {}, mesh)
        strategies = sharded.axes[0].strategies
        whole = {
            traced.program.inputs[value].index
            for node, strategy in strategies.items()
            if not node.meta["backward"]
            for value, placement in zip(list_inputs(node), strategy.inputs, strict=True)
            if value in traced.program.inputs and isinstance(placement, Replicate)
        }
        new = [number for number in whole if number < len(taken) and not isinstance(taken[number], Replicate)]
        if not new:
            return taken
        for number in new:
            taken[number] = Replicate()


def list_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the tensor inputs of an operator in the order of its strategies."""
    return [value for value in list_tensor_slots(node) if value is not None]


def place_change(
    traced: TracedCall, number: int, value: fx.Node, before: Placement, sharded: ShardedProgram
) -> Placement:
    """Return how the new value of an argument lies: as the old one, unless it has another shape.

    Raises:
        CannotDivide: The new value is whole, and the argument was not.
    """
    given = next(node for node, item in traced.program.inputs.items() if item.index == number)
    if isinstance(before, Replicate) or tuple(given.meta["val"].shape) == tuple(value.meta["val"].shape):
        return before
    found = settle(sharded.sharding(value)[0])
    if isinstance(found, Replicate):
        raise CannotDivide
    return found


def settle(placement: Placement) -> Placement:
    """Return the placement in which a result leaves a call: rows, a sum over the ranks, or the whole."""
    if isinstance(placement, Shard) or (isinstance(placement, Partial) and placement.reduce_op == "sum"):
        return placement
    return Replicate()


def list_shapes(traced: TracedCall, changed: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the logical shapes of results and of new values of `changed` arguments."""
    return tuple(tuple(value.shape) for value in list_values(traced, changed))


def list_values(traced: TracedCall, changed: Sequence[int]) -> list[LogicalValue]:
    """Return the values of results, and the new values of `changed` arguments."""
    results, values = traced.find_outputs("result"), traced.find_outputs("changed argument")
    nodes = [*(results[number] for number in sorted(results)), *(values[number] for number in changed)]
    return [node.meta["val"] for node in nodes]


def list_orders(lowered: LoweredCall) -> tuple[Any, ...]:
    """Return the orders in memory of results and new values; see `CallPlan`."""
    return tuple(
        OF_PART
        if not isinstance(placement, Shard) or has_rows_everywhere(placement)
        else find_memory_order(value.shape, value.strides)
        for value, placement in zip(list_values(lowered.traced, lowered.changed), lowered.placements, strict=True)
    )


def has_rows_everywhere(placement: Placement) -> bool:
    """Return whether every rank has several rows, whose strides show how a value lies in memory."""
    # Each by itself: which of several symbols is the least would become a guard.
    return not isinstance(placement, Shard) or all(length >= MIN_SYMBOLIC_SIZE for length in placement.lengths)


def is_argument(described: Any) -> bool:
    """Return whether an input of a call's program is an argument of the call; others are gradients."""
    return str(described.name).startswith("argument")


@dataclass(frozen=True, kw_only=True)
class ProgramParts:
    """A rank's program of a call, divided where the backward pass begins.

    Attributes:
        lowered: The program.
        forward: The operators of the forward pass, in order.
        backward: Those of the backward pass.
        arguments: The inputs that are arguments of the call.
        gradients: The inputs that are gradients.
        results: The results, then the new values of arguments.
        returned: The gradients of arguments, by number.
        kept: Values of the forward pass that the backward pass takes.
    """

    lowered: LoweredCall
    forward: list[fx.Node]
    backward: list[fx.Node]
    arguments: list[fx.Node]
    gradients: list[fx.Node]
    results: list[fx.Node]
    returned: dict[int, fx.Node]
    kept: list[fx.Node]

    @property
    def is_differentiable(self) -> bool:
        """Whether the forward pass may run under PyTorch's autograd: it has PyTorch's operators alone."""
        return all(
            "collective" not in node.meta
            and (node.target in DIFFERENTIABLE or getattr(node.target, "namespace", "") == "aten")
            for node in self.forward
        )

    @property
    def is_pointwise(self) -> bool:
        """Whether each element of the results depends on the elements in its place alone.

        A move between placements is no pointwise operator, so the rules have then changed none. Without an operator the
        function returns its argument, which it may do for the whole shape alone, as `x.sum_to_size(7, 5)`.
        """
        is_of_rows = not any(isinstance(item, Partial) for item in (*self.lowered.given, *self.lowered.placements))
        tags = [getattr(node.target, "tags", ()) for node in self.forward]
        return is_of_rows and bool(tags) and all(torch.Tag.pointwise in each for each in tags)

    def describe_forward(self) -> list[str]:
        """Return the operators of the forward pass as text, without the names of values."""
        names = {node: f"i{number}" for number, node in enumerate(self.arguments)}
        lines = []
        for number, node in enumerate(self.forward):
            names[node] = f"v{number}"
            arguments = fx.node.map_arg((node.args, node.kwargs), names.__getitem__)
            lines.append(f"{node.target} {arguments}")
        return [*lines, *(names[node] for node in self.results)]

    def write(self, results: Sequence[fx.Node]) -> fx.Graph:
        """Return the forward pass as a graph that returns these values."""
        return write_graph(self.arguments, self.forward, results)


def split_program(lowered: LoweredCall) -> ProgramParts:
    """Divide a rank's program of a call where the backward pass begins."""
    pairs = zip(lowered.local.outputs, lowered.traced.roles, strict=True)
    outputs = [(node, role, number) for (node, _), (role, number) in pairs]
    results = {number: node for node, role, number in outputs if role == "result"}
    values = [node for node, role, _ in outputs if role == "changed argument"]
    in_order = [*(results[number] for number in sorted(results)), *values]
    needed: set[fx.Node] = set()
    waiting = list(in_order)
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting.extend(node.all_input_nodes)
    arguments = [node for node, described in lowered.local.inputs if is_argument(described)]
    gradients = [node for node, described in lowered.local.inputs if not is_argument(described)]
    called = [node for node in lowered.local.graph.nodes if node.op == "call_function"]
    forward = [node for node in called if node in needed]
    backward = [node for node in called if node not in needed]
    returned = {number: node for node, role, number in outputs if role == "gradient"}
    known = {*arguments, *forward}
    taken = [value for node in backward for value in node.all_input_nodes if value in known]
    taken += [node for node in returned.values() if node in known]
    if returned:
        taken += [part for _, part in lowered.draws.values()]
    return ProgramParts(
        lowered=lowered,
        forward=forward,
        backward=backward,
        arguments=arguments,
        gradients=gradients,
        results=in_order,
        returned=returned,
        kept=list(dict.fromkeys(taken)),
    )


def add_programs(plan: CallPlan, parts: ProgramParts, symbols: Sequence[str]) -> CallPlan:
    """Return a pair with its programs."""
    forward = generate_function(parts.write([*parts.results, *parts.kept]), symbols)
    backward = None
    if parts.returned:
        graph = write_graph([*parts.kept, *parts.gradients], parts.backward, list(parts.returned.values()))
        backward = generate_function(graph, symbols)
    traced = parts.lowered.traced
    gradient_inputs = [described.index for _, described in parts.lowered.local.inputs if not is_argument(described)]
    again = None
    if parts.returned:
        draws = {node: (item, parts.kept.index(part)) for node, (item, part) in parts.lowered.draws.items()}
        again = make_gradient_call(traced, draws, symbols)
    return replace(
        plan,
        kind="pair",
        again=again,
        forward=forward,
        backward=backward,
        differentiated=tuple(traced.differentiated[index - traced.arguments] for index in gradient_inputs),
        gradients=tuple(parts.returned),
    )


def is_same_on_parts(parts: ProgramParts, mesh: Mesh, sizes: SymbolicSizes | None = None) -> bool:
    """Return whether a function's own program on the shapes of this rank's parts is the one that the rules made."""
    lowered, rank = parts.lowered, mesh.axes[0].rank
    if not parts.is_differentiable:
        return False
    if parts.is_pointwise:
        return True
    given = iter(lowered.given)
    arguments = lowered.call.arguments.map(
        lambda kind: replace(kind, shape=tuple(compute_local_shape(kind.shape, (next(given),), [rank]))),
        lambda number: number,
    )
    whole = (Replicate(),) * len(lowered.given)
    try:
        call = replace(lowered.call, arguments=arguments, placements=whole)
        local = lower_changing_call(call, lowered.changed, mesh, sizes, form="detached")
    except Exception:  # foreign code ran: the whole shape may stand among its arguments, as in a view
        return False
    return split_program(local).describe_forward() == parts.describe_forward()

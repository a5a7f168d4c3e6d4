"""Gradients of gradients through a pair of programs.

A pair's backward program runs below autograd. If its gradients will be differentiated again, then a call of PyTorch's
operators computes them instead: the traced gradients as a function of the call's arguments, of the gradients of its
results, and of the random numbers that the forward pass has drawn. The logical view runs this function as any other,
so it is traced with gradients of its own, and gradients of every order are right.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from rankless.compiler.ir.logical_program import is_random_node
from rankless.compiler.local_program import generate_function
from rankless.logical_view.trace_call_to_program import TracedCall
from rankless.parallel.tensor_placement import Placement

aten = torch.ops.aten
DROPOUT = aten.native_dropout.default
DRAWS = frozenset(
    {
        *(
            aten.bernoulli,
            aten.binomial,
            aten.cauchy,
            aten.exponential,
            aten.geometric,
            aten.log_normal,
            aten.multinomial,
        ),
        *(aten.normal, aten.normal_functional, aten.poisson, aten.uniform, aten.rand, aten.rand_like),
        *(aten.randn, aten.randn_like, aten.randint, aten.randint_like, aten.randperm),
    }
)
"""Operators whose results have no gradients."""
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
"""Is marked as random, but draws nothing."""


@dataclass(frozen=True, kw_only=True)
class GradientCall:
    """The gradients of a call as a function that the logical view runs.

    Attributes:
        name: The name of the call.
        arguments: The tensor arguments of the call, by number, that the function takes first. The gradients of the
            results come next, then random numbers.
        kept: The places of the random numbers among the values that the backward program keeps.
        placements: Those of the random numbers.
        shapes: Their logical shapes.
        graph: The function.
        symbols: The names of the symbols in it.
        numbers: Their numbers.
    """

    name: str
    arguments: tuple[int, ...]
    kept: tuple[int, ...]
    placements: tuple[Placement, ...]
    shapes: tuple[tuple[int, ...], ...]
    graph: fx.Graph
    symbols: tuple[str, ...]
    numbers: tuple[Any, ...] = ()

    @cached_property
    def function(self) -> Callable[..., Any]:
        """The function, one object, by which its plan is found."""
        made: Any = partial(generate_function(self.graph, self.symbols), *self.numbers)
        made.__name__ = f"the gradient of {self.name}"
        function: Callable[..., Any] = made
        return function


def find_draws(traced: TracedCall) -> list[fx.Node]:
    """Return the random numbers of a call. What dropout makes of its argument is no random number."""
    found = []
    for node in traced.program.graph.nodes:
        target = getattr(node.args[0] if node.target is getitem else node, "target", None)
        is_mask = target is DROPOUT and node.target is getitem and node.args[1] == 1
        if is_mask or getattr(target, "overloadpacket", None) in DRAWS:
            found.append(node)
    return found


def make_gradient_call(
    traced: TracedCall, draws: Mapping[fx.Node, tuple[Placement, int]], symbols: Sequence[str]
) -> GradientCall | None:
    """Return the gradients of a call as a function; None if this would draw random numbers again.

    Args:
        traced: The call.
        draws: Its random numbers: how they lie, and their places among the kept values.
        symbols: The names of the symbols in the call.
    """
    returned = list(traced.find_outputs("gradient").values())
    needed, waiting = set[fx.Node](), list(returned)
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += [] if node in draws else list_sources(node, draws)
    inputs = [node for node, item in traced.program.inputs.items() if item.index < traced.arguments and node in needed]
    gradients = [node for node, item in traced.program.inputs.items() if item.index >= traced.arguments]
    taken = [node for node in draws if node in needed]
    operators = [
        node
        for node in traced.program.graph.nodes
        if node.op == "call_function" and node in needed and node not in draws
    ]
    if any(is_random_node(node) and node.target not in (DROPOUT, ATTENTION) for node in operators):
        return None
    return GradientCall(
        name=traced.program.name,
        arguments=tuple(traced.program.inputs[node].index for node in inputs),
        kept=tuple(draws[node][1] for node in taken),
        placements=tuple(draws[node][0] for node in taken),
        shapes=tuple(tuple(node.meta["val"].shape) for node in taken),
        graph=write_graph([*inputs, *gradients, *taken], operators, returned),
        symbols=tuple(symbols),
    )


def list_sources(node: fx.Node, draws: Mapping[fx.Node, Any]) -> list[fx.Node]:
    """Return the values from which a value is computed, given the random numbers."""
    mask = find_dropout_mask(node, draws)
    return node.all_input_nodes if mask is None else [mask, *node.all_input_nodes[0].all_input_nodes]


def find_dropout_mask(node: fx.Node, draws: Mapping[fx.Node, Any] | Sequence[fx.Node]) -> fx.Node | None:
    """Return the mask if a value is what dropout makes of its argument."""
    if node.target is not getitem or node.args[1] != 0 or getattr(node.args[0], "target", None) is not DROPOUT:
        return None
    return next((draw for draw in draws if draw.target is getitem and draw.args[0] is node.args[0]), None)


def write_graph(inputs: Sequence[fx.Node], operators: Sequence[fx.Node], results: Sequence[fx.Node]) -> fx.Graph:
    """Return a graph of some operators of another one: dropout whose mask is given, and `copy`, as others do the same.

    PyTorch has no gradients for `copy`, and would draw a mask of dropout anew.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
    for node in operators:
        mask = find_dropout_mask(node, inputs)
        if mask is not None:
            dropout: Any = node.args[0]
            value, share, *_ = dropout.args
            masked = graph.call_function(aten.mul.Tensor, (copies[value], copies[mask]))
            copies[node] = graph.call_function(aten.mul.Tensor, (masked, 1 / (1 - share) if share != 1 else 0.0))
            continue
        target = fill_like if node.target is aten.copy.default else node.target
        copy = graph.create_node("call_function", target, name=node.name)
        copy.args, copy.kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
        copy.meta = dict(node.meta)
        copies[node] = copy
    graph.output(tuple(copies[node] for node in results))
    return graph


def fill_like(like: Tensor, value: Tensor, _non_blocking: bool = False) -> Tensor:
    """Return what `copy_` makes of its first argument."""
    return value.expand_as(like).to(like.dtype)

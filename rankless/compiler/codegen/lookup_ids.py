"""The part of a rank's program that computes the ids of its lookups: what is left without all that they do not need.

A program of the ids alone can run before the call, to ask for rows early (`context.upcoming_batches`).
"""

from collections.abc import Callable, Iterable, Sequence
from operator import getitem
from typing import NamedTuple

import torch
from torch import Tensor, fx

from rankless.compiler.lowering.lower import without_overwriting
from rankless.compiler.rules.extension_operators import Lookup

_NAMESPACES = ("aten", "prims")


class LookupIds(NamedTuple):
    """The lookups of a program whose ids follow from its inputs, without other ranks and random numbers.

    Args:
        graph: Computes their ids. It has all inputs of the program.
        sources: The number of what has the rows of each.
    """

    graph: fx.Graph
    sources: tuple[int, ...]


class IdsProgram(NamedTuple):
    """A program of ids, which draws, sends and changes nothing.

    Args:
        function: Takes the values of the whole program's inputs, and returns the ids of each lookup.
        sources: The number of what has the rows of each lookup.
    """

    function: Callable[..., Sequence[Tensor]]
    sources: tuple[int, ...]

    def __call__(self, values: Sequence[Tensor], sizes: Sequence[int] = ()) -> list[tuple[int, Tensor]]:
        """Return the source and the ids of each lookup, in the order of the program."""
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
            return list(zip(self.sources, self.function(*sizes, *values), strict=True))


def find_lookup_ids(graph: fx.Graph) -> LookupIds | None:
    """Return the part of a rank's program that computes ids; None if it has no lookup with such ids."""
    lookups = [node for node in graph.nodes if isinstance(node.target, Lookup)]
    known: dict[fx.Node, bool] = {}
    found = []
    for node in graph.nodes if lookups else ():
        known[node] = node.op == "placeholder" or (_is_pure(node) and all(known[each] for each in node.all_input_nodes))
    for node in lookups:
        _, ids, source, *_ = node.args
        if isinstance(ids, fx.Node) and known[ids] and isinstance(source, int):
            found.append((source, ids))
    if not found:
        return None
    return LookupIds(_copy_part(graph, [ids for _, ids in found]), tuple(source for source, _ in found))


def _is_pure(node: fx.Node) -> bool:
    """Return whether an operator depends on nothing but its arguments, and changes nothing."""
    if "collective" in node.meta:
        return False
    target = without_overwriting(node.target)
    if not isinstance(target, torch._ops.OpOverload):
        return target is getitem
    is_plain = target.namespace in _NAMESPACES and not target._schema.is_mutable
    return is_plain and torch.Tag.nondeterministic_seeded not in target.tags


def _copy_part(graph: fx.Graph, wanted: Iterable[fx.Node]) -> fx.Graph:
    """Return a graph of all inputs, and of what the wanted values need. Its output is the wanted values."""
    wanted = list(wanted)
    needed, rest = set(wanted), list(wanted)
    while rest:
        inputs = [each for each in rest.pop().all_input_nodes if each not in needed]
        needed.update(inputs)
        rest += inputs
    part, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node.op == "placeholder":
            copies[node] = part.placeholder(node.name)
        elif node in needed:
            # The arguments are set afterwards: PyTorch warns about sizes among the arguments of a new node.
            copies[node] = copy = part.call_function(without_overwriting(node.target))
            copy.args = fx.map_arg(node.args, copies.__getitem__)
            copy.kwargs = fx.map_arg(node.kwargs, copies.__getitem__)
            copy.meta["line"] = node.meta.get("line", "")
    part.output(tuple(copies[node] for node in wanted))
    return part

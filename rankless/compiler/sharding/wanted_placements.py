"""Placements in which values will be needed, for operators that choose how to compute them."""

from collections.abc import Iterator, Mapping

import torch
from torch import fx

from rankless.compiler.ir.logical_program import LogicalProgram, is_fresh
from rankless.compiler.rules.pointwise import is_pointwise
from rankless.compiler.tracing.symbolic_sizes import is_same
from rankless.parallel.tensor_placement import OnRank, Placement, Shard

aten = torch.ops.aten


def find_wanted_placements(
    program: LogicalProgram, given: Mapping[fx.Node, Placement], weights: Mapping[fx.Node, Placement]
) -> dict[fx.Node, Placement]:
    """Return the placements in which values are wanted: gradients, the terms of them, and what meets an expert.

    Args:
        program: The program.
        given: The placements of its inputs along one axis.
        weights: Those of divided parameters, and of views of them.
    """
    found = dict(list_gradients(program, given))
    owners: dict[fx.Node, set[OnRank]] = {}
    for weight, placement in weights.items():
        if isinstance(placement, OnRank):
            for user in weight.users:
                for value in user.all_input_nodes:
                    owners.setdefault(value, set()).add(placement)
    pending = [(value, next(iter(ranks))) for value, ranks in owners.items() if len(ranks) == 1]
    while pending:
        value, owner = pending.pop()
        if value not in found:
            found[value] = owner
            pending += [(term, owner) for term in value.all_input_nodes if is_used_only_for(term, value)]
    return found


def is_used_only_for(term: fx.Node, value: fx.Node) -> bool:
    """Return whether a value is a view of another one, or is computed of it element by element, and nothing else is."""
    if not isinstance(value.target, torch._ops.OpOverload) or len(term.users) != 1 or term.op != "call_function":
        return False
    if len(value.all_input_nodes) == 1 and not is_fresh(value):
        return True
    shapes = [getattr(node.meta.get("val"), "shape", ()) for node in (term, value)]
    return is_pointwise(value.target) and is_same(shapes[0], shapes[1])


def list_gradients(program: LogicalProgram, given: Mapping[fx.Node, Placement]) -> Iterator[tuple[fx.Node, Placement]]:
    """Yield the gradients of divided parameters, and the terms of them, with the placements in which they are kept."""
    states = {described.name: given[node] for node, described in program.inputs.items()}
    found: set[fx.Node] = set()
    for node, described in program.outputs:
        placement = states.get(described.name)
        if described.kind != "gradient" or not isinstance(placement, Shard | OnRank):
            continue
        pending = [node]
        while pending:
            term = pending.pop()
            if term in found:
                continue
            found.add(term)
            yield term, placement
            if term.target in (aten.add.Tensor, aten._to_copy.default, aten.clone.default):
                pending += [
                    item for item in term.all_input_nodes if is_same(item.meta["val"].shape, term.meta["val"].shape)
                ]

"""Experts that are modules of their own, which a layer computes one after another.

Note [modules as experts]: modules of a list, or with numbered names, are experts if they have the same parameters, none
is computed from what another one returns, and their results are combined. So the layers of a model are no experts, nor
are the heads of attention in a list, which multiply samples with samples. Each expert belongs to one rank.
"""

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import combinations

from torch import fx

from rankless.compiler.ir.logical_program import LogicalProgram, LogicalValue
from rankless.parallel.tensor_placement import Shard, split_lengths

NUMBERED = re.compile(r"(.*?)(\d+)")
"""The name of one of several modules: a number, or text and a number."""
SAMPLE_PRODUCTS = ("bmm", "baddbmm", "_scaled_dot_product")
"""How the names of operators begin that multiply matrices, each of several."""

Siblings = dict[int, dict[str, str]]
"""The parameters of modules with the same place in a model, by number: names within the module, and whole names."""


@dataclass(frozen=True)
class WeightUse:
    """Where a program uses its parameters.

    Attributes:
        weights: The parameters, and all values that are computed of parameters only.
        values: The parameters by name.
    """

    weights: Set[fx.Node]
    values: Mapping[str, fx.Node]


def divide_module_experts(program: LogicalProgram, use: WeightUse, ranks: int, kept: Set[str]) -> dict[str, Shard]:
    """Return the placements of the parameters of experts that are modules: each has all its rows on one rank.

    Args:
        program: The program.
        use: Where it uses its parameters.
        ranks: The number of ranks.
        kept: The names of parameters about which a script has decided.
    """
    found: dict[str, Shard] = {}
    for siblings in list_siblings(use.values):
        names = [name for parameters in siblings.values() for name in parameters.values()]
        is_decided = any(name in found or name in kept for name in names)
        if is_decided or len(siblings) < ranks or not are_experts(program, use, siblings):
            continue
        owners = [rank for rank, count in enumerate(split_lengths(len(siblings), ranks)) for _ in range(count)]
        for owner, (_, parameters) in zip(owners, sorted(siblings.items()), strict=True):
            for name in parameters.values():
                shape = use.values[name].meta["val"].shape
                if len(shape) and shape[0]:
                    found[name] = Shard(0, tuple(shape[0] if rank == owner else 0 for rank in range(ranks)))
    return found


def list_siblings(names: Mapping[str, fx.Node]) -> Iterator[Siblings]:
    """Yield groups of modules, or of numbered parameters, with the same parameters; the outermost modules first."""
    groups: dict[tuple[int, str, str], Siblings] = {}
    for name in names:
        parts = name.split(".")
        for place, part in enumerate(parts):
            if match := NUMBERED.fullmatch(part):
                key = place, ".".join(parts[:place]), match[1]
                groups.setdefault(key, {}).setdefault(int(match[2]), {})[".".join(parts[place + 1 :])] = name
    for _, siblings in sorted(groups.items(), key=lambda item: item[0][0]):
        kinds: dict[tuple[object, ...], Siblings] = {}
        for number, parameters in siblings.items():
            kind = tuple(sorted((inner, tuple(names[name].meta["val"].shape)) for inner, name in parameters.items()))
            kinds.setdefault(kind, {})[number] = parameters
        yield from (same for same in kinds.values() if len(same) > 1)


def are_experts(program: LogicalProgram, use: WeightUse, siblings: Siblings) -> bool:
    """Return whether modules are experts; see Note [modules as experts]."""
    roots = [{use.values[name] for name in parameters.values()} for parameters in siblings.values()]
    forward = [node for node in program.graph.nodes if node.op == "call_function" and not node.meta.get("backward")]
    weights = [follow(forward, root) & use.weights for root in roots]
    reached = [follow(forward, root) - use.weights for root in roots]
    if not all(reached):
        return False
    for node in forward:
        if node in use.weights:
            continue
        inputs = {value for value in node.all_input_nodes if not is_scalar(value)}
        users = [place for place, own in enumerate(weights) if inputs & own]
        sources = [place for place, own in enumerate(reached) if inputs & own]
        if len(users) > 1 or any(place != user for user in users for place in sources):
            return False
        if len(sources) == 1 and multiplies_samples(node, reached[sources[0]]):
            return False
    return any(combines(node, reached) for node in forward)


def follow(nodes: Sequence[fx.Node], roots: Set[fx.Node]) -> set[fx.Node]:
    """Return some values, and all that follows from them."""
    found = set(roots)
    for node in nodes:
        if any(value in found for value in node.all_input_nodes):
            found.add(node)
    return found


def is_scalar(node: fx.Node) -> bool:
    """Return whether a value has no dims, as a penalty on weights, or is no tensor."""
    value = node.meta.get("val")
    return not isinstance(value, LogicalValue) or not value.shape


def multiplies_samples(node: fx.Node, reached: Set[fx.Node]) -> bool:
    """Return whether an operator multiplies matrices that both follow from samples of one module."""
    name = getattr(node.target, "__name__", "")
    factors = [value for value in node.all_input_nodes if value in reached]
    return name.startswith(SAMPLE_PRODUCTS) and len(factors) > 1


def combines(node: fx.Node, reached: Sequence[Set[fx.Node]]) -> bool:
    """Return whether an operator combines what two modules return, and not only two losses."""
    if is_scalar(node):
        return False
    sources = [{place for place, own in enumerate(reached) if item in own} for item in node.all_input_nodes]
    return any(one - other and other - one for one, other in combinations(sources, 2))

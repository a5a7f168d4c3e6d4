"""Expert parallelism: choose how the parameters of a program are divided along the axis `expert`.

The experts of a mixture are usually computed together: each of their weights is one tensor with a row for each expert,
and a batched matrix product computes with it what every expert computes of its samples. The batch of this product are
the experts. So their dim is found by the operator, and what is divided with it by Note [linked dims]. Other values may
have to be gathered, as the results of all experts for a sum over them; that does not matter here. The layer that
chooses experts has a row for each of them too. It stays whole, because every sample needs all rows.

Note [modules as experts]: experts may also be modules of their own, which a layer computes one after another. Modules
of a list, or with numbered names, are experts if they have the same parameters, none is computed from what another one
returns, and their results are combined. So the layers of a model are no experts, nor are the heads of attention in a
list, which multiply samples with samples. Each expert belongs to one rank.
"""

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import torch
from torch import fx

import rankless.compiler.ir.custom_ops  # noqa: F401 - it defines the operators of Rankless
from rankless.compiler.ir.logical_program import LogicalProgram, LogicalValue
from rankless.compiler.sharding.reordered_values import REORDERINGS
from rankless.compiler.tensor_parallel import DimReach, TensorDivider, ValueDim
from rankless.parallel.tensor_placement import BlockedShard, Shard, split_lengths

BATCHED_PRODUCTS: Mapping[object, tuple[int, int]] = {
    torch.ops.aten.bmm.default: (0, 1),
    torch.ops.aten.baddbmm.default: (1, 2),
}
"""Operators that multiply matrices for each row of dim 0, and the places of their factors."""
PLAIN_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.rankless.linear.default)
"""Operators that multiply one matrix with all samples."""
VIEWS = (*REORDERINGS, torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


class ExpertDivider(TensorDivider):
    """Chooses the divided dims of the parameters of experts."""

    @cached_property
    def _weights(self) -> frozenset[fx.Node]:
        """The values of the program that are computed of parameters only."""
        return find_weights(self._program)

    def divide(self, *, fills: bool) -> dict[str, Shard | BlockedShard]:
        """Return the placements of the parameters that are divided, by name; see `TensorDivider.divide`."""
        together = super().divide(fills=fills)
        values = {name: value for value, name in self._names.items()}
        found: dict[str, Shard | BlockedShard] = {
            name: placement
            for name, placement in together.items()
            if name in self._requests or not self._computes_all_samples(values[name])
        }
        if fills:
            use = WeightUse(self._weights, values)
            found |= divide_module_experts(self._program, use, self._ranks, {*self._requests, *found})
        return found

    def _is_offered(self, reach: DimReach) -> bool:
        """Return whether a dim is that of experts."""
        names = [self._names[item.value] for item in reach.dims if item.value in self._names]
        is_free = not any(name in self._requests for name in names)
        return is_free and reach.units >= self._ranks and any(map(self._computes_experts, list_products(reach)))

    def _list_exclusive(self, reach: DimReach) -> list[ValueDim]:
        """Return the parameters. Another value may be moved, as a product of the weights of experts with each other."""
        return [item for item in reach.dims if item.value in self._names]

    def _computes_all_samples(self, weight: fx.Node) -> bool:
        """Return whether the forward pass multiplies all samples with a weight, or with a view of it."""
        users = [user for user in weight.users if not user.meta.get("backward")]
        products = [user for user in users if user.target in PLAIN_PRODUCTS]
        views = [user for user in users if user.target in VIEWS]
        has_samples = any(value not in self._weights for product in products for value in product.all_input_nodes)
        return has_samples or any(map(self._computes_all_samples, views))

    def _computes_experts(self, product: fx.Node) -> bool:
        """Return whether one factor of a product is a weight, or computed of weights only, and the other is not."""
        places = BATCHED_PRODUCTS[product.target]
        return len([place for place in places if product.args[place] in self._weights]) == 1


def list_products(reach: DimReach) -> list[fx.Node]:
    """Return the batched products of the forward pass whose batch is among the dims of a reach."""
    found: dict[fx.Node, None] = {}
    for item in reach.dims:
        for user in item.value.users:
            places = BATCHED_PRODUCTS.get(user.target)
            if places is not None and not user.meta.get("backward"):
                factors = [ValueDim(factor, 0) for factor in map(user.args.__getitem__, places) if factor is item.value]
                found |= dict.fromkeys([user] * (item in factors))
    return list(found)


def find_weights(program: LogicalProgram) -> frozenset[fx.Node]:
    """Return the parameters of a program, and the values that are computed of nothing else."""
    found: set[fx.Node] = set()
    for node in program.graph.nodes:
        described = program.inputs.get(node)
        if described is not None:
            is_weight = described.kind == "parameter"
        else:
            is_weight = bool(node.all_input_nodes) and all(item in found for item in node.all_input_nodes)
        if is_weight:
            found.add(node)
    return frozenset(found)


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

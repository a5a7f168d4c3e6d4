"""Expert parallelism: the axis `expert` divides the experts of a mixture, each with all its parameters on one rank.

A mixture computes y = sum over experts e of g_e(x) * f_e(x), with g_e(x) = 0 for the experts that a sample does not
choose. Rank r has the parameters of its experts, E_r. It gets the samples that chose them by an all-to-all, computes
f_e of those for e in E_r, and the sum over E_r. A second all-to-all, or a sum over the ranks, brings the results back.
This is the scheme of Lepikhin et al., "GShard" (2020), for any code that computes the sum. Three steps find it:

- `ExpertDivider` chooses the parameters that the axis divides.
- `list_strategies` runs operators on the rank that has an expert: see `tensor_placement`, Note [values on one rank].
- `join_sums_of_experts` reorders the sum, so that few values move.

Note [experts in one tensor]: the experts of a mixture are usually computed together: each of their weights is one
tensor with a row for each expert, and a batched matrix product computes with it what every expert computes of its
samples. The batch of this product are the experts. So their dim is found by the operator, and what is divided with it
by Note [linked dims]. Other values may have to be gathered, as the results of all experts for a sum over them; that
does not matter here. The layer that chooses experts has a row for each of them too. It stays whole, because every
sample needs all rows.

Note [modules as experts]: experts may also be modules of their own, which a layer computes one after another. Modules
of a list, or with numbered names, are experts if they have the same parameters, none is computed from what another one
returns, and their results are combined. So the layers of a model are no experts, nor are the heads of attention in a
list, which multiply samples with samples. Each expert belongs to one rank.

Note [operators on one rank]: any operator can run on the rank that has one of its inputs, if it gets the others there
too. An operator that is linear in such an input can also take it as a term of a sum, of which the other ranks have
zeros. So the results of experts on different ranks are added, or stacked, without moving them.

Note [sums of experts]: a loop over experts adds their results to a sum one after another. If each expert is on one
rank, each result would have to be moved to be added to what all ranks share. So the results of one rank's experts are
added first, then those of all ranks, as terms that are moved once, and then the rest.
"""

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

import torch
from torch import fx

import rankless.compiler.ir.custom_ops  # noqa: F401 - it defines the operators of Rankless
from rankless.compiler.ir.logical_program import LogicalProgram, LogicalValue, draws_by_counter
from rankless.compiler.rules.random import dropout_strategies, lower_dropout
from rankless.compiler.rules.strategy import OperatorCall, ShardingRule, Strategy
from rankless.compiler.rules.views import REORDERINGS
from rankless.compiler.tensor_parallel import DimReach, TensorDivider, ValueDim
from rankless.compiler.tracing.symbolic_sizes import is_same
from rankless.parallel.tensor_placement import BlockedShard, OnRank, Partial, Placement, Shard, split_lengths

aten = torch.ops.aten

BATCHED_PRODUCTS: Mapping[object, tuple[int, int]] = {
    aten.bmm.default: (0, 1),
    aten.baddbmm.default: (1, 2),
}
"""Operators that multiply matrices for each row of dim 0, and the places of their factors."""
PLAIN_PRODUCTS = (aten.mm.default, aten.addmm.default, torch.ops.rankless.linear.default)
"""Operators that multiply one matrix with all samples."""
VIEWS = (*REORDERINGS, aten.view.default, aten._unsafe_view.default)


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


def list_strategies(call: OperatorCall, rule: ShardingRule) -> list[Strategy]:
    """Return the strategies of a call by the rule of its operator, with those for values that single ranks have.

    See Note [operators on one rank].

    Of those that send as much, the first is the best. An input that several experts use is moved to them. Any other
    work is shared by all ranks, if it can be, or one rank does it, rather than all computing terms of a sum.

    Args:
        call: The call.
        rule: The rule of its operator.
    """
    current = [item for item in call.current_placements if isinstance(item, OnRank)]
    owners = list(dict.fromkeys([*current, *([call.wanted] if isinstance(call.wanted, OnRank) else [])]))
    alone = [strategy for owner in owners for strategy in run_on(owner, call)]
    if not current:
        return [*alone, *rule(call)]
    as_terms = replace(call, placements=dict(zip(call.inputs, read_as_terms(call.current_placements), strict=True)))
    others = list(rule(as_terms))
    shared = [item for item in others if any(isinstance(placement, Shard) for placement in item.outputs)]
    terms = [item for item in others if item not in shared]
    return [*alone, *shared, *terms] if meets_experts(call) else [*shared, *alone, *terms]


def no_strategies(_call: OperatorCall) -> Iterator[Strategy]:
    """Yield nothing: the rule of an operator that nothing is known of."""
    return iter(())


def meets_experts(call: OperatorCall) -> bool:
    """Return whether several operators take an input of a call together with values of single ranks."""
    divided = [
        value
        for value, placement in zip(call.inputs, call.current_placements, strict=True)
        if not isinstance(placement, OnRank)
    ]

    def counts(user: fx.Node) -> bool:
        return any(isinstance(call.placements.get(value), OnRank) for value in user.all_input_nodes)

    return any(sum(map(counts, value.users)) > 1 for value in divided)


def read_as_terms(placements: Sequence[Placement]) -> list[Placement]:
    """Return placements with what one rank has as terms of a sum, as which every rule knows it."""
    return [Partial() if isinstance(item, OnRank) else item for item in placements]


def run_on(owner: OnRank, call: OperatorCall) -> Iterator[Strategy]:
    """Yield the strategy of a call that runs on one rank; nothing for one that draws random numbers in its own way."""
    inputs, outputs = (owner,) * len(call.inputs), (owner,) * len(call.output_shapes)
    if torch.Tag.nondeterministic_seeded not in call.operator.tags:
        yield Strategy(inputs, outputs)
    elif call.operator is aten.native_dropout.default and call.output_shapes[0] and list(dropout_strategies(call)):
        yield Strategy(inputs, outputs, lower_dropout)


def runs_everywhere(node: fx.Node) -> bool:
    """Return whether every rank runs an operator, also those without its values: their generators advance too."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) or draws_by_counter(node)


JOINED = "joined"
"""The mark of a sum that has been reordered."""


def join_sums_of_experts(graph: fx.Graph, placements: Mapping[fx.Node, Placement]) -> bool:
    """Reorder the sums of a logical graph that have results of experts among other terms. Return whether any was.

    See Note [sums of experts].

    Args:
        graph: The graph, which is changed. The final value of each sum keeps its node.
        placements: The placements of its values along one axis.
    """
    changed = False
    if not any(isinstance(placement, OnRank) for placement in placements.values()):
        return changed
    for node in list(graph.nodes):
        if not is_sum(node) or JOINED in node.meta or any(is_within(node, user) for user in node.users):
            continue
        terms = list(list_terms(node))
        owned = [term for term in terms if isinstance(placements.get(term), OnRank)]
        if 2 <= len(owned) < len(terms):
            changed |= reorder(graph, node, terms, owned, placements)
    return changed


def is_sum(node: fx.Node) -> bool:
    """Return whether a node adds two values of its own shape and dtype."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != len(node.args):
        return False
    value = node.meta["val"]
    inputs = [item.meta["val"] for item in node.all_input_nodes]
    return len(inputs) == 2 and all(item.dtype == value.dtype and is_same(item.shape, value.shape) for item in inputs)


def is_within(node: fx.Node, user: fx.Node) -> bool:
    """Return whether a sum is only a term of another one."""
    return is_sum(node) and len(node.users) == 1 and is_sum(user) and is_same_pass(node, user)


def is_same_pass(one: fx.Node, other: fx.Node) -> bool:
    """Return whether two operators belong to the same pass, forward or backward, and are computed again together."""
    return all(one.meta.get(name) == other.meta.get(name) for name in ("backward", "checkpoint"))


def list_terms(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the terms of a sum in their order."""
    for value in node.all_input_nodes:
        if is_within(value, node):
            yield from list_terms(value)
        else:
            yield value


def reorder(
    graph: fx.Graph,
    node: fx.Node,
    terms: Sequence[fx.Node],
    owned: Sequence[fx.Node],
    placements: Mapping[fx.Node, Placement],
) -> bool:
    """Let a sum add the results of experts first. Return whether this is possible.

    A sum lies in memory as its first term does, and it must lie as it did before: see Note [memory layout].

    Args:
        graph: The graph.
        node: The sum.
        terms: Its terms.
        owned: Those that single ranks have.
        placements: The placements of values.
    """
    groups: dict[Placement, list[fx.Node]] = {}
    for term in owned:
        groups.setdefault(placements[term], []).append(term)
    others, replaced = [term for term in terms if term not in owned], node.all_input_nodes
    parts = [[others], list(groups.values())]
    parts.sort(key=lambda part: lies_as(part[0][0], node), reverse=True)
    if not lies_as(parts[0][0][0], node):
        return False
    with graph.inserting_before(node):
        node.args = tuple(add_all(graph, node, [add_all(graph, node, group) for group in part]) for part in parts)
    node.meta[JOINED] = True
    remove_unused(graph, replaced)
    return True


def lies_as(term: fx.Node, node: fx.Node) -> bool:
    """Return whether two values of the same shape lie alike in memory."""
    return is_same(term.meta["val"].strides, node.meta["val"].strides)


def remove_unused(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Remove sums that nothing uses any more, and the sums within them."""
    for node in nodes:
        if is_sum(node) and not node.users:
            inputs = node.all_input_nodes
            graph.erase_node(node)
            remove_unused(graph, inputs)


def add_all(graph: fx.Graph, like: fx.Node, terms: Sequence[fx.Node]) -> fx.Node:
    """Add the sum of some terms to a graph, described like another one; it lies in memory as its first term does."""
    total = terms[0]
    for term in terms[1:]:
        total = graph.call_function(aten.add.Tensor, (total, term))
        total.meta.update(like.meta, val=terms[0].meta["val"])
    return total

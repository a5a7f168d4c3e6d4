"""Choose how the parameters of a program are divided along the axis `expert`.

The experts of a mixture are usually computed together: each of their weights is one tensor with a row for each expert,
and a batched matrix product computes with it what every expert computes of its samples. The batch of this product are
the experts. So their dim is found by the operator, and what is divided with it by Note [linked dims]. Other values may
have to be gathered, as the results of all experts for a sum over them; that does not matter here. The layer that
chooses experts has a row for each of them too. It stays whole, because every sample needs all rows.

Experts may also be modules of their own, each of which belongs to one rank (`module_experts`).
"""

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import fx

import rankless.compiler.ir.custom_ops  # noqa: F401 - it defines the operators of Rankless
from rankless.compiler.ir.logical_program import LogicalProgram
from rankless.compiler.sharding.reordered_values import REORDERINGS
from rankless.compiler.tensor_parallel.dim_links import DimReach, ValueDim
from rankless.compiler.tensor_parallel.division import TensorDivider
from rankless.compiler.tensor_parallel.module_experts import WeightUse, divide_module_experts
from rankless.parallel.tensor_placement import BlockedShard, Shard

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

"""Tensor parallelism: choose how the parameters of a program are divided along the axis `tensor`.

With the hidden features of an MLP divided, rank r has the columns A_r of the first weight and the rows B_r of the
second. f(x A) B = sum over r of f(x A_r) B_r for an elementwise f, so each rank computes a term, and one all-reduce the
sum. Its gradient is that of every term; the gradient of x is a sum of terms again, with a second all-reduce.

Note [choice of dims]: dims that are divided together are one choice (Note [linked dims]): the heads of an attention
layer, the hidden features of an MLP, the channels between two convolutions, the vocabulary. Each has a price: the bytes
that are sent for every byte of parameters that is divided. Choices are made in the order of their prices, if no value
is divided along two dims then. Dims that an operator needs whole are not divided, unless a script asks for it.
For transformers this gives the program of Megatron-LM (Shoeybi et al., 2019).

Note [linked dims]: if an axis divides the rows of the first weight of an MLP, it divides the hidden features, their
activations, and the columns of the second weight. The sharding rules say so: asked with one dim of one input divided,
a rule answers which dims of the other inputs and of the outputs are divided then, or has no strategy. In the latter
case the value would have to be gathered. An operator whose outputs are not divided sums over the dim. Rules are asked
as for one rank, which makes any length a valid one. The relations between lengths remain: a reshape from 12 heads of
64 features to 768 features relates one head to 64 features.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, prod
from operator import getitem
from typing import Any

import torch
from torch import fx

from rankless.compiler.ir.logical_program import LogicalProgram, LogicalValue
from rankless.compiler.rule_table import find_rule
from rankless.compiler.rules.strategy import OperatorCall, Strategy, make_call
from rankless.compiler.tracing.symbolic_sizes import size_hint
from rankless.parallel.tensor_placement import BlockedShard, Placement, Replicate, Shard, split_lengths

WHOLE = None
"""In place of a dim, for a parameter that is not divided."""


@dataclass(frozen=True, kw_only=True)
class DimRequest:
    """What a script wants of a parameter: the dim to divide, or `WHOLE`."""

    dim: int | None


aten = torch.ops.aten
SPLITS = (
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.unbind.int,
)
"""Operators that take a dim apart, which may consist of equal blocks."""


@dataclass(frozen=True)
class ValueDim:
    """A dim of a value of a program; with `blocks` above 1, each of so many equal parts of it is divided alike."""

    value: fx.Node
    dim: int
    blocks: int = 1

    @property
    def length(self) -> int:
        """The length of a block."""
        return int(size_hint(self.value.meta["val"].shape[self.dim])) // self.blocks

    @property
    def placement(self) -> Placement:
        """The placement that divides the dim, on one rank."""
        if self.blocks > 1:
            return BlockedShard(self.dim, (self.length,))
        return Shard(self.dim, (self.length,))

    @staticmethod
    def of(value: fx.Node, placement: Placement) -> "ValueDim | None":
        """Return the dim that a placement divides; None if it divides none."""
        if isinstance(placement, BlockedShard):
            return ValueDim(value, placement.dim, int(value.meta["val"].shape[placement.dim]) // placement.block)
        return ValueDim(value, placement.dim) if isinstance(placement, Shard) else None


@dataclass(frozen=True, kw_only=True)
class OperatorLinks:
    """What follows at one operator if one dim of an input is divided."""

    inputs: tuple[ValueDim, ...] = ()
    outputs: tuple[ValueDim, ...] = ()
    shared: tuple[fx.Node, ...] = ()
    """Inputs that every rank needs whole for its part of the outputs, so that their gradients are sums over ranks."""
    sums: bool = False
    """Whether the operator sums over the dim."""
    is_gathered: bool = False
    """Whether the operator needs the whole dim."""


@dataclass(kw_only=True, eq=False)
class DimReach:
    """All dims that are divided if one of them is, and what this costs.

    Dicts stand for sets, because all ranks must see the same order.
    """

    dims: dict[ValueDim, None] = field(default_factory=dict)
    """The first one is that from which they were found."""
    sums: dict[fx.Node, None] = field(default_factory=dict)
    """Operators that sum over one of them."""
    shared: dict[fx.Node, None] = field(default_factory=dict)
    """Values of which every rank needs the whole, and whose gradients are sums over ranks."""
    gathers: dict[tuple[fx.Node, ValueDim], None] = field(default_factory=dict)
    """Operators that need a whole one, and which."""
    returned: dict[ValueDim, None] = field(default_factory=dict)
    """Those of values that the program returns, which every rank needs whole."""

    @property
    def units(self) -> int:
        """The largest number of pieces into which every dim can be divided in proportion."""
        return gcd(*(item.length for item in self.dims))

    def join(self, other: "DimReach") -> None:
        """Add the dims of another reach that are divided together with these."""
        self.dims |= other.dims
        self.sums |= other.sums
        self.shared |= other.shared
        self.gathers |= other.gathers
        self.returned |= other.returned


class DimLinks:
    """The links between the dims of a program's forward pass."""

    def __init__(self, program: LogicalProgram) -> None:
        self._differentiable = find_differentiable(program)
        self._returned = {node for node, output in program.outputs if output.kind in ("result", "check", "mutation")}
        self._known: dict[tuple[fx.Node, ValueDim], OperatorLinks] = {}

    def find_reach(self, start: ValueDim) -> DimReach:
        """Return what is divided with a dim. If the dim proves to consist of blocks, each block is divided."""
        reach = self._follow(start)
        counts = {count for node, gathered in reach.gathers for count in find_blocks(node, gathered, start)}
        for count in sorted(counts):
            other = self._follow(ValueDim(start.value, start.dim, count))
            if len(other.gathers) < len(reach.gathers):
                reach = other
        return reach

    def _follow(self, start: ValueDim) -> DimReach:
        reach, pending = DimReach(), [start]
        while pending:
            item = pending.pop()
            if item in reach.dims:
                continue
            reach.dims[item] = None
            if item.value in self._returned:
                reach.returned[item] = None
            for user in item.value.users:
                if user.op == "output" or user.meta.get("backward"):
                    continue
                links = self._find_links(user, item)
                pending += [other for other in (*links.inputs, *links.outputs) if other not in reach.dims]
                reach.shared |= dict.fromkeys(value for value in links.shared if value in self._differentiable)
                if links.sums:
                    reach.sums[user] = None
                if links.is_gathered:
                    reach.gathers[user, item] = None
        return reach

    def _find_links(self, node: fx.Node, item: ValueDim) -> OperatorLinks:
        key = node, item
        if key not in self._known:
            self._known[key] = find_links(node, item)
        return self._known[key]


def find_differentiable(program: LogicalProgram) -> set[fx.Node]:
    """Return the values of the forward pass that have gradients: those that depend on parameters, but no parameters."""
    found: set[fx.Node] = set()
    parameters = list_parameters(program)
    for node in program.graph.nodes:
        value = node.meta.get("val")
        is_real = not isinstance(value, LogicalValue) or value.dtype.is_floating_point
        depends = any(item in found or item in parameters for item in node.all_input_nodes)
        if depends and is_real and not node.meta.get("backward"):
            found.add(node)
    return found


def find_links(node: fx.Node, item: ValueDim) -> OperatorLinks:
    """Return what follows at an operator if one dim of an input is divided."""
    call = make_call(node, AllWhole({item.value: item.placement}), 1)
    strategy = find_strategy(call, item)
    if strategy is None:
        return OperatorLinks(is_gathered=True)
    outputs = find_output_dims(node, strategy)
    given = [ValueDim.of(value, placement) for value, placement in zip(call.inputs, strategy.inputs, strict=True)]
    return OperatorLinks(
        inputs=tuple(other for other in given if other is not None and other != item),
        outputs=outputs,
        shared=tuple(value for value, known in zip(call.inputs, given, strict=True) if known is None)
        if outputs
        else (),
        sums=not outputs,
    )


class AllWhole(dict[fx.Node, Placement]):
    """Placements by value; that of a value without one is `Replicate`."""

    def __missing__(self, value: fx.Node) -> Placement:
        return Replicate()


def find_strategy(call: OperatorCall, item: ValueDim) -> Strategy | None:
    """Return a strategy of an operator that takes an input as it is divided; None if there is none."""
    rule = find_rule(call.operator)
    if rule is None:
        return None
    for strategy in rule(call):
        pairs = zip(call.inputs, strategy.inputs, strict=True)
        if all(placement == item.placement for value, placement in pairs if value is item.value):
            return strategy
    return None


def find_output_dims(node: fx.Node, strategy: Strategy) -> tuple[ValueDim, ...]:
    """Return the dims of an operator's outputs that a strategy divides."""
    if isinstance(node.meta["val"], LogicalValue):
        found = [ValueDim.of(node, strategy.outputs[0])]
    else:
        parts = [user for user in node.users if user.target is getitem]
        found = [ValueDim.of(part, strategy.outputs[int(str(part.args[1]))]) for part in parts]
    return tuple(item for item in found if item is not None)


def find_blocks(node: fx.Node, gathered: ValueDim, start: ValueDim) -> Iterable[int]:
    """Return into how many blocks a dim may be divided so that an operator need not gather it.

    Args:
        node: An operator that takes the dim apart, or another one.
        gathered: The dim that it needs whole.
        start: The dim of which this is a consequence.
    """
    if node.target not in SPLITS:
        return
    value = node.meta["val"]
    parts = list(value) if isinstance(value, tuple | list) else [value]
    source = gathered.value.meta["val"]
    if len(parts[0].shape) < len(source.shape):  # the dim itself counts the blocks
        count = int(size_hint(source.shape[gathered.dim]))
    else:
        sizes = {int(size_hint(part.shape[gathered.dim])) for part in parts}
        whole = int(size_hint(source.shape[gathered.dim]))
        count = whole // min(sizes) if min(sizes) and whole % min(sizes) == 0 else 1
    if count > 1 and start.length % count == 0:
        yield count


def list_parameters(program: LogicalProgram) -> Mapping[fx.Node, str]:
    """Return the parameters of a program with their names."""
    return {node: item.name for node, item in program.inputs.items() if item.kind == "parameter"}


class TensorDivider:
    """Chooses the divided dims of one program's parameters.

    Args:
        ranks: The number of ranks along the axis.
        requests: What the script wants of parameters, by name.
        excluded: The dims of parameters that another axis divides, by name.
    """

    def __init__(
        self,
        program: LogicalProgram,
        ranks: int,
        requests: Mapping[str, DimRequest],
        excluded: Mapping[str, int] | None = None,
    ) -> None:
        self._program = program
        self._ranks = ranks
        self._excluded = excluded or {}
        self._requests = requests
        self._names = list_parameters(program)
        self._links = DimLinks(program)

    def divide(self, *, fills: bool) -> dict[str, Shard | BlockedShard]:
        """Return the placements of the parameters that are divided, by name.

        Args:
            fills: Whether to choose also for parameters of which the script wants nothing. If not, only those are
                divided that are linked with a wanted one.
        """
        reaches, taken = self._find_reaches()
        chosen = [reach for reach in reaches if self._is_requested(reach)]
        offered = [reach for reach in reaches if fills and reach not in chosen and self._is_offered(reach)]
        for reach in chosen:
            take(reach, taken)
        for reach in sorted(offered, key=self._price):
            if not has_conflicts(self._list_exclusive(reach), taken):
                chosen.append(reach)
                take(reach, taken)
        return self._place(chosen, taken)

    def _place(self, chosen: Sequence[DimReach], taken: Mapping[fx.Node, ValueDim]) -> dict[str, Shard | BlockedShard]:
        """Return the placements of the parameters in some reaches.

        If some ranks would have nothing of what is linked, only the parameters that a script names are divided.
        """
        found: dict[str, Shard | BlockedShard] = {}
        for reach in chosen:
            for item in reach.dims:
                name = self._names.get(item.value)
                if name is None or taken[item.value] != item or self._is_kept_whole(name):
                    continue
                units = reach.units
                if units < self._ranks:
                    units = item.length
                    if name not in self._requests:
                        continue
                lengths = tuple(unit * (item.length // units) for unit in split_lengths(units, self._ranks))
                found[name] = Shard(item.dim, lengths) if item.blocks == 1 else BlockedShard(item.dim, lengths)
        return found

    def _find_reaches(self) -> tuple[list[DimReach], dict[fx.Node, ValueDim]]:
        """Return what is divided together, for each dim of each parameter, and the dims that the script wants.

        A dim with fewer units than ranks is left whole, because some ranks would have nothing of it, as the keys of
        attention with fewer groups than ranks. What it is linked with can be divided all the same.
        """
        found: list[DimReach] = []
        wanted: dict[fx.Node, ValueDim] = {}
        for value, name in self._names.items():
            shape = value.meta["val"].shape
            request = self._requests.get(name)
            for dim in range(len(shape)):
                if (request is not None and request.dim != dim) or self._excluded.get(name) == dim:
                    continue
                reach = self._links.find_reach(ValueDim(value, dim))
                if request is not None:
                    wanted[value] = next(iter(reach.dims))
                elif reach.units < self._ranks:
                    continue
                found.append(reach)
        return join_overlapping(found), wanted

    def _is_requested(self, reach: DimReach) -> bool:
        """Return whether the script wants one of these dims to be divided."""
        requests = ((self._requests.get(self._names.get(item.value, "")), item) for item in reach.dims)
        return any(request is not None and request.dim == item.dim for request, item in requests)

    def _is_kept_whole(self, name: str) -> bool:
        """Return whether the script wants a parameter whole."""
        request = self._requests.get(name)
        return request is not None and request.dim is WHOLE

    def _is_offered(self, reach: DimReach) -> bool:
        """Return whether these dims are divided without a script's asking for it."""
        names = [self._names[item.value] for item in reach.dims if item.value in self._names]
        return reach.units >= self._ranks and not reach.gathers and not any(name in self._requests for name in names)

    def _list_exclusive(self, reach: DimReach) -> list[ValueDim]:
        """Return the dims of a reach whose values are not to be divided along another dim too."""
        return list(reach.dims)

    def _price(self, reach: DimReach) -> float:
        """Return how many bytes are sent, forward and backward, for each byte of parameters that is divided."""
        parameters = sum(count_value_bytes(item.value.meta["val"]) for item in reach.dims if item.value in self._names)
        summed = sum(count_value_bytes(node.meta["val"]) for node in (*reach.sums, *reach.shared))
        gathered = sum(count_value_bytes(item.value.meta["val"]) for item in reach.returned)
        return (2 * summed + gathered) / parameters


def take(reach: DimReach, taken: dict[fx.Node, ValueDim]) -> None:
    """Note the dims of a reach, the first one of each value, except for values of which another one is noted."""
    for item in reach.dims:
        taken.setdefault(item.value, item)


def has_conflicts(dims: Sequence[ValueDim], taken: Mapping[fx.Node, ValueDim]) -> bool:
    """Return whether a value would be divided along two dims.

    Args:
        dims: Dims that are divided together.
        taken: The dims in which values are divided already.
    """
    own: dict[fx.Node, ValueDim] = {}
    return any(own.setdefault(item.value, item) != item or taken.get(item.value, item) != item for item in dims)


def join_overlapping(reaches: Sequence[DimReach]) -> list[DimReach]:
    """Join reaches that have dims in common, in the order of their first ones."""
    place: dict[ValueDim, DimReach] = {}
    joined: list[DimReach] = []
    for reach in reaches:
        known = list({id(place[item]): place[item] for item in reach.dims if item in place}.values())
        target = known[0] if known else DimReach()
        if not known:
            joined.append(target)
        for other in known[1:]:
            target.join(other)
            joined = [item for item in joined if item is not other]
        target.join(reach)
        place |= dict.fromkeys(target.dims, target)
    return joined


def count_value_bytes(value: Any) -> int:
    """Return the bytes of a value, or of several together; those of sizes and absent values are none."""
    values = value if isinstance(value, tuple | list) else (value,)
    return sum(
        prod(int(size_hint(size)) for size in item.shape) * item.element_size()
        for item in values
        if isinstance(item, LogicalValue)
    )

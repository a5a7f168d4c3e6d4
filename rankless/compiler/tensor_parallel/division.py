"""Choose how the parameters of a program are divided along the axis `tensor`.

Note [choice of dims]: dims that are divided together are one choice (Note [linked dims]): the heads of an attention
layer, the hidden features of an MLP, the channels between two convolutions, the vocabulary. Each has a price: the bytes
that are sent for every byte of parameters that is divided. Choices are made in the order of their prices, if no value
is divided along two dims then. Dims that an operator needs whole are not divided, unless a script asks for it.
For transformers this gives the program of Megatron-LM (Shoeybi et al., 2019).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torch import fx

from rankless.compiler.ir.logical_program import LogicalProgram, LogicalValue
from rankless.compiler.tensor_parallel.dim_links import DimLinks, DimReach, ValueDim, list_parameters
from rankless.compiler.tracing.symbolic_sizes import size_hint
from rankless.parallel.tensor_placement import BlockedShard, Shard, split_lengths

WHOLE = None
"""In place of a dim, for a parameter that is not divided."""


@dataclass(frozen=True, kw_only=True)
class DimRequest:
    """What a script wants of a parameter: the dim to divide, or `WHOLE`."""

    dim: int | None


class TensorDivider:
    """Chooses the divided dims of one program's parameters.

    Args:
        program: The program.
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


def count_value_bytes(value: LogicalValue | tuple[LogicalValue, ...]) -> int:
    """Return the bytes of a value, or of several."""
    values = value if isinstance(value, tuple) else (value,)
    return sum(
        prod(int(size_hint(size)) for size in item.shape) * item.element_size()
        for item in values
        if isinstance(item, LogicalValue)
    )

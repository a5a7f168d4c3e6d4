"""Selections of rows by a mask that an axis divides: each rank selects among its own rows.

Note [selections of divided rows]: along an axis that divides a dim of the mask, a rank has the rows of its part.
How many each rank has is a count for each of them, known only while the program runs. All values that the same mask
selects have the same counts, so they are divided alike. If the first dim of the mask is divided, the parts lie in the
order of one device. If another dim is, they do not, because the first dim counts slowest: rows must then be reordered
when they are gathered, and no rank may draw random numbers for its part alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import SymInt, fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv, _constrain_range_for_size

from rankless.compiler.tracing.symbolic_sizes import find_traced_count, limit_count
from rankless.parallel.tensor_placement import Placement, Shard


@dataclass(frozen=True)
class RowSelection:
    """The rows that a mask selects, divided along an axis.

    Args:
        mask: The mask.
        dim: The dim of it that the axis divides.
        lengths: The lengths of its parts.
        counts: The number of rows that each rank along the axis selects.
    """

    mask: fx.Node
    dim: int
    lengths: tuple[int, ...]
    counts: tuple[Any, ...]

    @property
    def is_ordered(self) -> bool:
        """Whether the parts of all ranks, one after the other, are in the order of one device."""
        return self.dim == 0


class RowSelections:
    """The divided selections of a program, kept with its symbols.

    Args:
        environment: The `ShapeEnv` of the symbols.
    """

    def __init__(self, environment: ShapeEnv) -> None:
        self._environment = environment
        self._known: dict[tuple[Any, ...], RowSelection] = {}
        self._by_count: dict[Any, RowSelection] = {}
        self._by_whole: dict[tuple[Any, int], list[RowSelection]] = {}

    def divide(self, count: SymInt, mask: fx.Node, placement: Shard, axis: int) -> RowSelection:
        """Return a divided selection.

        Args:
            count: The number of rows that the whole mask selects.
            mask: The mask.
            placement: How the axis divides the mask.
            axis: The number of the axis.
        """
        key = (mask, placement.dim, str(placement.lengths), axis)
        if key not in self._known:
            limit = limit_count(self._environment, find_traced_count(count))
            counts = tuple(self._create_count(limit) for _ in placement.lengths)
            self._known[key] = RowSelection(mask, placement.dim, placement.lengths, counts)
            self._by_count |= {find_traced_count(item): self._known[key] for item in counts}
            self._by_whole.setdefault((find_traced_count(count), axis), []).append(self._known[key])
        return self._known[key]

    def find(self, count: Any) -> RowSelection | None:
        """Return the selection of which a count of one rank's rows is; None if it is no such count."""
        return self._by_count.get(find_traced_count(count))

    def list_divided(self, count: Any, axis: int) -> Sequence[RowSelection]:
        """Return the known selections of a number of rows that an axis divides."""
        return self._by_whole.get((find_traced_count(count), axis), ())

    def _create_count(self, limit: int) -> SymInt:
        with self._environment.ignore_fresh_unbacked_symbols():
            count = self._environment.create_unbacked_symint()
        _constrain_range_for_size(count, min=0, max=limit)
        return count


def get_selections(count: Any) -> RowSelections:
    """Return the selections of the program of which a count is."""
    environment = count.node.shape_env
    if environment.selections is None:
        environment.selections = RowSelections(environment)
    found: RowSelections = environment.selections
    return found


def find_selection(placement: Placement) -> RowSelection | None:
    """Return the selection whose rows a placement divides; None if it divides others, or several of them as one."""
    if not isinstance(placement, Shard) or not placement.lengths or find_traced_count(placement.lengths[0]) is None:
        return None
    return get_selections(placement.lengths[0]).find(placement.lengths[0])


def is_reordered(placements: Sequence[Placement]) -> bool:
    """Return whether parts of selected rows are not in the order of one device."""
    found = map(find_selection, placements)
    return any(item is not None and not item.is_ordered for item in found)

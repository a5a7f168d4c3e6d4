"""Which sizes of a job's arguments vary from call to call, and which calls a program for varying sizes fits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rankless.compiler.capture.capture import ArgumentShape
from rankless.compiler.tracing.symbolic_sizes import MIN_SYMBOLIC_SIZE, SymbolicSizes
from rankless.parallel.placement import Placement, Shard, split_lengths

Shapes = tuple[tuple[int, ...], ...]
"""The logical shapes of a call's tensors."""

ArgumentDim = tuple[int, int]
"""A dim of an argument: (number of the tensor, dim)."""

DISTINCT = 3
"""From so many distinct shapes on, sizes that have varied become symbols."""


class SizeHistory:
    """The sizes that calls of one kind have had."""

    def __init__(self) -> None:
        self._distinct: set[Shapes] = set()
        self._first: dict[ArgumentDim, int] = {}
        self._varied: set[ArgumentDim] = set()
        self._entries: dict[ArgumentDim, int] = {}

    def add(self, shapes: Shapes) -> None:
        """Note a call's shapes. Places that once had different sizes are told apart from then on."""
        self._distinct.add(shapes)
        numbers: dict[tuple[int, int], int] = {}
        for place, size in list_sizes(shapes).items():
            if size != self._first.setdefault(place, size):
                self._varied.add(place)
            self._entries[place] = numbers.setdefault((self._entries.get(place, 0), size), len(numbers))

    def groups(self, shapes: Shapes) -> tuple[tuple[ArgumentDim, ...], ...]:
        """The places that vary, those that have always had equal sizes together; none before the third shape."""
        found: dict[int, list[ArgumentDim]] = {}
        for place, size in list_sizes(shapes).items():
            if len(self._distinct) >= DISTINCT and place in self._varied and size >= MIN_SYMBOLIC_SIZE:
                found.setdefault(self._entries[place], []).append(place)
        return tuple(map(tuple, found.values()))


def list_sizes(shapes: Shapes) -> dict[ArgumentDim, int]:
    """The size at every place."""
    return {(number, dim): size for number, shape in enumerate(shapes) for dim, size in enumerate(shape)}


@dataclass(frozen=True, kw_only=True)
class VaryingSizes:
    """What calls a program for varying sizes is right for."""

    groups: tuple[tuple[ArgumentDim, ...], ...]
    """The places of each varying size, in the order of `symbols`."""
    symbols: tuple[str, ...]
    fixed: Mapping[ArgumentDim, int]
    holds: Callable[[Sequence[int]], bool]
    """The guards, on the varying sizes."""

    def fits(self, shapes: Shapes) -> bool:
        """Whether the program is right for these shapes."""
        sizes = list_sizes(shapes)
        return (
            all(sizes[place] == size for place, size in self.fixed.items())
            and all(sizes[place] == sizes[group[0]] for group in self.groups for place in group)
            and self.holds([sizes[group[0]] for group in self.groups])
        )

    def sizes(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """The varying sizes of a call, by symbol, in order."""
        return {
            symbol: shapes[group[0][0]][group[0][1]] for symbol, group in zip(self.symbols, self.groups, strict=True)
        }


def make_symbolic_shapes(
    sizes: SymbolicSizes, shapes: Sequence[ArgumentShape], groups: Sequence[Sequence[ArgumentDim]]
) -> tuple[ArgumentShape, ...]:
    """The shapes with a new symbol for every group of places."""
    changed = [list(item.shape) for item in shapes]
    for number, group in enumerate(groups):
        first, dim = group[0]
        size = sizes.create(shapes[first].shape[dim], f"size {number}")
        for argument, dim in group:
            changed[argument][dim] = size
    return tuple(
        ArgumentShape(shape=tuple(shape), dtype=item.dtype) for shape, item in zip(changed, shapes, strict=True)
    )


def is_even_split(placement: Placement, shape: Sequence[int]) -> bool:
    """Whether a value's shard lengths follow from its size, or it has none."""
    if not isinstance(placement, Shard):
        return True
    return placement.lengths == split_lengths(shape[placement.dim], len(placement.lengths))


def resize_placement(placement: Placement, shape: Sequence[int]) -> Placement:
    """The same placement of a value with varying sizes."""
    if isinstance(placement, Shard) and not isinstance(shape[placement.dim], int):
        return Shard(placement.dim, split_lengths(shape[placement.dim], len(placement.lengths)))
    return placement

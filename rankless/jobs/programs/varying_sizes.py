"""Find which sizes of a job's arguments vary between calls, and which calls a program for varying sizes fits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from torch import nn

from rankless.compiler.capture.capture import ArgumentShape
from rankless.compiler.capture.trace_errors import find_user_line
from rankless.compiler.tracing.symbolic_sizes import MIN_SYMBOLIC_SIZE, SymbolicSizes, is_symbolic
from rankless.errors import RanklessError
from rankless.parallel.tensor_placement import Shard, Sharding, split_lengths

Shapes = tuple[tuple[int, ...], ...]
"""The logical shapes of a call's tensors."""

ArgumentDim = tuple[int, int]
"""A dim of an argument: (number of the tensor, dim)."""

MIN_DISTINCT_SHAPES = 3
"""Number of distinct shapes from which on varying sizes become symbols."""


class SizeHistory:
    """The sizes that the calls of one cache entry have had."""

    def __init__(self) -> None:
        self._distinct: set[Shapes] = set()
        self._first: dict[ArgumentDim, int] = {}
        self._varied: set[ArgumentDim] = set()
        self._group_ids: dict[ArgumentDim, int] = {}

    def add(self, shapes: Shapes) -> None:
        """Add a call's shapes. Dims whose sizes differ belong to different groups from then on."""
        self._distinct.add(shapes)
        numbers: dict[tuple[int, int], int] = {}
        for dim_key, size in list_sizes(shapes).items():
            if size != self._first.setdefault(dim_key, size):
                self._varied.add(dim_key)
            self._group_ids[dim_key] = numbers.setdefault((self._group_ids.get(dim_key, 0), size), len(numbers))

    def groups(self, shapes: Shapes) -> tuple[tuple[ArgumentDim, ...], ...]:
        """Return the varying dims, grouped by sizes that were always equal; nothing before the third shape."""
        found: dict[int, list[ArgumentDim]] = {}
        for dim_key, size in list_sizes(shapes).items():
            if len(self._distinct) >= MIN_DISTINCT_SHAPES and dim_key in self._varied and size >= MIN_SYMBOLIC_SIZE:
                found.setdefault(self._group_ids[dim_key], []).append(dim_key)
        return tuple(map(tuple, found.values()))


def list_sizes(shapes: Shapes) -> dict[ArgumentDim, int]:
    """Return the size of every dim."""
    return {(number, dim): size for number, shape in enumerate(shapes) for dim, size in enumerate(shape)}


@dataclass(frozen=True, kw_only=True)
class SizeConstraints:
    """The sizes for which a program for varying sizes is valid."""

    groups: tuple[tuple[ArgumentDim, ...], ...]
    """The dims of each varying size, in the order of `symbols`."""
    symbols: tuple[str, ...]
    fixed: Mapping[ArgumentDim, int]
    holds: Callable[[Sequence[int]], bool]
    """The guards, as a function of the varying sizes."""

    def fits(self, shapes: Shapes) -> bool:
        """Whether the program is valid for these shapes."""
        sizes = list_sizes(shapes)
        return (
            all(sizes[dim_key] == size for dim_key, size in self.fixed.items())
            and all(sizes[dim_key] == sizes[group[0]] for group in self.groups for dim_key in group)
            and self.holds([sizes[group[0]] for group in self.groups])
        )

    def sizes(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """Return the varying sizes of a call by symbol, in order."""
        return {
            symbol: shapes[group[0][0]][group[0][1]] for symbol, group in zip(self.symbols, self.groups, strict=True)
        }


class SizeGuards(msgspec.Struct, frozen=True):
    """The guards of a rank's program for varying sizes, or why it has no such program. Ranks exchange them."""

    conditions: list[str]
    failure: str = ""


def make_symbolic_shapes(
    sizes: SymbolicSizes, shapes: Sequence[ArgumentShape], groups: Sequence[Sequence[ArgumentDim]]
) -> tuple[ArgumentShape, ...]:
    """Return the shapes with a new symbol for every group of dims."""
    changed = [list(item.shape) for item in shapes]
    for number, group in enumerate(groups):
        first, dim = group[0]
        size = sizes.create(shapes[first].shape[dim], f"size {number}")
        for argument, dim in group:
            changed[argument][dim] = size
    return tuple(replace(item, shape=tuple(shape)) for shape, item in zip(changed, shapes, strict=True))


def list_uneven_dims(sharding: Sharding, shape: Sequence[int]) -> list[int]:
    """Return the dims of a value whose shard lengths do not follow from its size."""
    return [
        placement.dim
        for placement in sharding
        if isinstance(placement, Shard)
        and placement.lengths != split_lengths(shape[placement.dim], len(placement.lengths))
    ]


def resize_sharding(sharding: Sharding, shape: Sequence[int]) -> Sharding:
    """Return the sharding of the same value with varying sizes."""
    return tuple(
        Shard(placement.dim, split_lengths(shape[placement.dim], len(placement.lengths)))
        if isinstance(placement, Shard) and not isinstance(shape[placement.dim], int)
        else placement
        for placement in sharding
    )


def list_namespaces(function: Callable[..., Any], modules: Mapping[str, nn.Module]) -> list[dict[str, Any]]:
    """Return the namespaces where a job may store a size: the attributes of its modules, and its globals."""
    found = [vars(part) for module in modules.values() for part in module.modules()]
    return [*found, getattr(function, "__globals__", {})]


def remove_sizes(namespaces: Sequence[dict[str, Any]], before: Sequence[Mapping[str, Any]]) -> list[str]:
    """Restore values that the job replaced by symbolic sizes, which mean nothing outside it. Returns their names."""
    removed = []
    for names, known in zip(namespaces, before, strict=True):
        for name in [name for name, value in names.items() if is_symbolic(value)]:
            removed.append(name)
            names[name] = known.get(name)
    return removed


def describe_failure(error: Exception, line: str) -> str:
    """Describe in one line why a capture failed, after the script's line; `line` if no nearer one is known."""
    if isinstance(error, RanklessError):
        text, where = str(error.found), error.where
    else:
        text, where = f"{type(error).__name__}: {error}", None
    return f"{where or find_user_line(error) or line}: {text}".partition("\n")[0]


def find_fixing_line(sizes: SymbolicSizes) -> str:
    """Return the first line of the script that needed the number of a symbolic size."""
    return next((line for line in sizes.shape_env.specializing_lines if line), "")

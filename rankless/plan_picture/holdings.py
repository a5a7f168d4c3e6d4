"""The workers of a mesh as a grid, and how much each holds of a module's parameters, gradients and optimizer state."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from math import prod
from typing import Literal

from rankless.records.number_formatting import format_decimal_bytes, format_ranges
from rankless.records.parallel_plan import PlannedAxis, StateDivision, StatePlan


@dataclass(frozen=True)
class WorkerGrid:
    """The workers of a run along the axes of their mesh, from the outermost axis."""

    axes: tuple[PlannedAxis, ...]

    @property
    def count(self) -> int:
        """The number of workers."""
        return prod(axis.size for axis in self.axes)

    def find_ranks(self, worker: int) -> dict[str, int]:
        """Return the rank of a worker along each axis."""
        ranks: dict[str, int] = {}
        for axis in reversed(self.axes):
            worker, ranks[axis.name] = divmod(worker, axis.size)
        return {axis.name: ranks[axis.name] for axis in self.axes}

    def find_worker(self, ranks: Sequence[int]) -> int:
        """Return the worker with these ranks, one for each axis."""
        worker = 0
        for axis, rank in zip(self.axes, ranks, strict=True):
            worker = worker * axis.size + rank
        return worker

    def list_blocks(self) -> Iterator[tuple[int, ...]]:
        """Yield the ranks along all axes but the last two: a picture has a block of rows and columns for each."""
        yield from product(*(range(axis.size) for axis in self.axes[:-2]))


def format_axes(axes: Sequence[PlannedAxis]) -> str:
    """Return the axes of a mesh as "pipeline 2 x data 4"."""
    return " x ".join(f"{axis.name} {axis.size}" for axis in axes)


def format_workers(workers: Sequence[int]) -> str:
    """Return sorted numbers of workers as "worker 3" or "workers 0-3, 8"."""
    return f"worker{'s' if len(workers) > 1 else ''} {', '.join(format_ranges(workers))}"


HeldKind = Literal["parameters", "gradients", "optimizer state"]
FIELDS: dict[HeldKind, Literal["value", "gradient", "optimizer_state"]] = {
    "parameters": "value",
    "gradients": "gradient",
    "optimizer state": "optimizer_state",
}
PIPELINE = "pipeline"
SIZES_SHOWN = 3
_BITS = re.compile(r"\d+")


@dataclass(frozen=True, kw_only=True)
class HeldTensor:
    """A parameter: its name, bytes and plan; no plan for one that every worker holds whole."""

    name: str
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    plan: StatePlan | None
    stage: int | None
    """Its stage in a pipeline."""

    def list_divisions(self, kind: HeldKind) -> tuple[StateDivision, ...]:
        """Return how it, its gradient or its optimizer state is divided, by one axis after the other."""
        divisions: tuple[StateDivision, ...] = () if self.plan is None else getattr(self.plan, FIELDS[kind])
        return divisions


@dataclass(frozen=True, kw_only=True)
class Holding:
    """Who holds some parameters, or what belongs to them.

    Attributes:
        kinds (tuple[HeldKind, ...]): What is held in this way.
        whole_bytes (int): The bytes of the whole parameters.
        held_bytes (tuple[int, ...]): For each worker the bytes of the parameters whose elements it holds.
        text (str): The same in words.
    """

    kinds: tuple[HeldKind, ...]
    whole_bytes: int
    held_bytes: tuple[int, ...]
    text: str


def describe_holdings(tensors: Sequence[HeldTensor], grid: WorkerGrid, *, trains: bool) -> list[Holding]:
    """Return who holds some parameters; what is held in the same way together."""
    kinds: list[HeldKind] = list(FIELDS) if trains else ["parameters"]
    found: dict[tuple[tuple[StateDivision, ...], ...], list[HeldKind]] = {}
    for kind in kinds:
        found.setdefault(tuple(tensor.list_divisions(kind) for tensor in tensors), []).append(kind)
    return [
        Holding(
            kinds=tuple(members),
            whole_bytes=sum(tensor.bytes for tensor in tensors),
            held_bytes=count_held(tensors, grid, members[0]),
            text=describe_held(tensors, members[0], grid.count),
        )
        for members in found.values()
    ]


def count_held(tensors: Sequence[HeldTensor], grid: WorkerGrid, kind: HeldKind) -> tuple[int, ...]:
    """Return for each worker the bytes of the parameters whose elements it holds."""
    return tuple(
        sum(count_shard(tensor, grid.find_ranks(worker), kind) for tensor in tensors) for worker in range(grid.count)
    )


def count_shard(tensor: HeldTensor, ranks: Mapping[str, int], kind: HeldKind) -> int:
    """Return the bytes of a tensor's elements that the worker with these ranks along the axes holds."""
    held = Fraction(tensor.bytes)
    for division in tensor.list_divisions(kind):
        rows, rank = sum(division.lengths), ranks.get(division.axis, 0)
        held *= Fraction(division.lengths[rank], rows) if rows and rank < len(division.lengths) else 0
    return int(held)


def describe_held(tensors: Sequence[HeldTensor], kind: HeldKind, workers: int) -> str:
    """Describe how some parameters are held, or what belongs to them."""
    if workers == 1:
        return "whole on the worker"
    whole, stages = 0, dict[int, int]()
    divided: dict[tuple[str, ...], list[list[int]]] = {}
    divisions = [tensor.list_divisions(kind) for tensor in tensors]
    if not any(divisions):
        return "whole on every worker"
    if len(divisions) == 1 and tensors[0].stage is None:
        return describe_divisions(divisions[0])
    for tensor, found in zip(tensors, divisions, strict=True):
        if tensor.stage is not None:
            stages[tensor.stage] = stages.get(tensor.stage, 0) + tensor.bytes
        elsewhere = tuple(item for item in found if tensor.stage is None or item.axis != PIPELINE)
        if elsewhere:
            add_sizes(divided.setdefault(tuple(item.axis for item in elsewhere), []), elsewhere, tensor.bytes)
        elif tensor.stage is None:
            whole += tensor.bytes
    texts = [f"{format_decimal_bytes(whole)} whole"] if whole else []
    texts += [describe_stages(stages)] if stages else []
    texts += [f"along {' and '.join(axes)}: {describe_sizes(join_sizes(sizes))}" for axes, sizes in divided.items()]
    return "; ".join(texts)


def add_sizes(sizes: list[list[int]], divisions: Sequence[StateDivision], size: int) -> None:
    """Add the bytes of the shards of a tensor to those of other tensors along the same axes."""
    shards = [Fraction(size)]
    for division in divisions:
        rows = sum(division.lengths)
        shards = [shard * length / rows if rows else Fraction(0) for shard in shards for length in division.lengths]
    sizes.append([int(shard) for shard in shards])


def join_sizes(sizes: Sequence[Sequence[int]]) -> list[int]:
    """Return the bytes of each shard of all tensors together."""
    return [sum(shards) for shards in zip(*sizes, strict=True)]


def is_owned(division: StateDivision) -> bool:
    """Return whether one of several workers has all rows."""
    return len(division.lengths) > 1 and len([length for length in division.lengths if length]) == 1


def describe_stages(stages: Mapping[int, int]) -> str:
    """Describe on which stages parameters are, given the bytes of each."""
    if len(stages) == 1:
        return f"on stage {next(iter(stages))}"
    ordered = sorted(stages)
    if len(stages) < SIZES_SHOWN:
        return ", ".join(f"stage {stage}: {format_decimal_bytes(stages[stage])}" for stage in ordered)
    return f"on {len(stages)} stages, {ordered[0]} to {ordered[-1]}"


def describe_sizes(sizes: Sequence[int]) -> str:
    """Describe the bytes of shards along an axis."""
    holders = [rank for rank, size in enumerate(sizes) if size]
    if len(holders) == 1:
        return f"all on rank {holders[0]}"
    if len(set(sizes)) == 1:
        return f"{len(sizes)} x {format_decimal_bytes(sizes[0])}"
    if len(sizes) <= SIZES_SHOWN:
        return " + ".join(map(format_decimal_bytes, sizes))
    least, most = format_decimal_bytes(min(sizes)), format_decimal_bytes(max(sizes))
    return f"{len(sizes)} x about {most}" if least == most else f"{len(sizes)} x {least} to {most}"


def describe_divisions(divisions: Sequence[StateDivision]) -> str:
    """Describe how one tensor is divided by one axis after the other; "whole" if it is not."""
    texts = [
        f"what is left of dim {item.dim} evenly along {item.axis}"
        if any(item.dim == earlier.dim for earlier in divisions[:place]) and not is_owned(item)
        else describe_division(item)
        for place, item in enumerate(divisions)
    ]
    return ", then ".join(texts) or "whole"


def describe_division(division: StateDivision) -> str:
    """Describe how one tensor is divided, as "dim 0 split 5+5 along data"."""
    lengths = division.lengths
    if is_owned(division):
        holder = next(rank for rank, length in enumerate(lengths) if length)
        return f"all on rank {holder} along {division.axis}"
    text = "+".join(map(str, lengths))
    if len(lengths) > SIZES_SHOWN:
        text = f"{len(lengths)} x {'-'.join(map(str, dict.fromkeys([min(lengths), max(lengths)])))}"
    return f"dim {division.dim} split {text} along {division.axis}"


def count_tensor_bytes(shape: Sequence[int], dtype: str) -> int:
    """Return the bytes of a tensor, with the size of an element from the name of its type, such as "bfloat16"."""
    found = _BITS.search(dtype)
    size = (int(found[0]) + 7) // 8 if found else 1
    for length in shape:
        size *= length
    return size

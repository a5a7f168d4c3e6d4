"""The workers of a mesh as a grid, from the names and sizes of its axes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from rankless.records.parallel_plan import PlannedAxis
from rankless.records.quantities import format_ranges


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

"""The entries of a job's program cache, and the call that looks one up."""

from dataclasses import dataclass, field

from rankless.compiler.guards.guards import Guard
from rankless.jobs.arguments import FlattenedArguments
from rankless.jobs.programs.bound_program import BoundProgram
from rankless.jobs.programs.varying_sizes import ArgumentDim, Shapes, SizeHistory, list_uneven_dims
from rankless.parallel.tensor_placement import Sharding

MAX_PROGRAMS = 16
"""Programs kept per entry and shapes, the most recently used."""


@dataclass
class CacheEntry:
    """The programs of calls that differ only in sizes."""

    history: SizeHistory = field(default_factory=SizeHistory)
    by_shapes: dict[Shapes, list[BoundProgram]] = field(default_factory=dict)
    varying: list[BoundProgram] = field(default_factory=list)
    """Programs for varying sizes. `by_shapes` holds them too, under the shapes seen so far."""
    failures: int = 0


@dataclass(frozen=True, kw_only=True)
class CacheLookup:
    """A call with its logical shapes and shardings, and the cache entry that it belongs to."""

    arguments: FlattenedArguments
    shapes: Shapes
    shardings: tuple[Sharding, ...]
    entry: CacheEntry
    known: BoundProgram | None
    """The valid program for it, if there is one."""

    def stale_guard(self) -> Guard | None:
        """Return a guard that failed, so that a program for these shapes is no longer valid."""
        programs = (*self.entry.by_shapes.get(self.shapes, ()), *self.entry.varying)
        return next((bound.captured.guards.first_failing() for bound in programs), None)

    def varying(self) -> tuple[tuple[ArgumentDim, ...], ...]:
        """Return the dims with varying sizes, except those that a sharding splits unevenly."""
        uneven = {
            (number, dim)
            for number, (sharding, shape) in enumerate(zip(self.shardings, self.shapes, strict=True))
            for dim in list_uneven_dims(sharding, shape)
        }
        return tuple(group for group in self.entry.history.groups(self.shapes) if not uneven.intersection(group))


def find_fitting(entry: CacheEntry, shapes: Shapes) -> BoundProgram | None:
    """Return a valid program for varying sizes that fits these shapes."""
    for bound in entry.varying:
        if bound.varying_sizes is not None and bound.varying_sizes.fits(shapes) and bound.is_valid:
            return bound
    return None


def move_to_front(programs: list[BoundProgram], used: BoundProgram) -> None:
    """Move the used program to the front and drop the oldest, so that changing values cannot fill memory."""
    programs[:] = [used, *(other for other in programs if other is not used)][:MAX_PROGRAMS]

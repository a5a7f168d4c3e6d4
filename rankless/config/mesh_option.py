"""The mesh of a run as a user names it: `data=2,pipeline=4`."""

from collections.abc import Sequence
from math import prod

from rankless.errors import ConfigError
from rankless.records.parallel_plan import PlannedAxis

AXES = ("pipeline", "data", "expert", "sequence", "tensor")
"""The axes that a mesh may have, from the outermost: along the innermost, workers of one host are neighbours."""
MESH_HELP = (
    "Axes of the mesh and their sizes, as data=2,tensor=4: `data` divides the batch, `tensor` the features and heads "
    "of each layer, `pipeline` the layers of the model, `sequence` the positions of sequences, `expert` the experts of "
    "mixtures, and the batch too. The product is the number of workers. Default: all workers along data."
)


def parse_mesh(text: str) -> tuple[PlannedAxis, ...]:
    """Return the axes of a mesh from the outermost, whatever the order in which they are named.

    Raises:
        ConfigError: The text names no mesh.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        if name not in AXES or not number.isdecimal() or int(number) < 1:
            raise ConfigError(
                expected=f"axes as name=size, separated by commas, with the names {', '.join(sorted(AXES))} and "
                "sizes from 1 up",
                found=f"{part.strip()!r} in --mesh {text}",
                fix="for example --mesh data=2,pipeline=2",
            )
        if name in sizes:
            raise ConfigError(
                expected="each axis of a mesh once", found=f"{name} twice in --mesh {text}", fix="name it once"
            )
        sizes[name] = int(number)
    return tuple(PlannedAxis(name=name, role=name, size=sizes[name]) for name in AXES if name in sizes)


def make_heterogeneous_mesh(hosts: Sequence[tuple[int, int]]) -> tuple[PlannedAxis, ...]:
    """Return the mesh of a run with heterogeneous workers.

    Args:
        hosts: For each host the number of its workers, and of those that are heterogeneous.
    """
    kinds = divide_ranks(hosts)
    return (PlannedAxis(name="pipeline", role="pipeline", size=sum(map(len, kinds)), stage_workers=kinds),)


def divide_ranks(hosts: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks of the workers that are not heterogeneous, and of those that are: the last ones of each host.

    Args:
        hosts: For each host the number of its workers, and of those that are heterogeneous.
    """
    others: list[int] = []
    heterogeneous: list[int] = []
    for workers, count in hosts:
        first = len(others) + len(heterogeneous)
        others += range(first, first + workers - count)
        heterogeneous += range(first + workers - count, first + workers)
    return tuple(others), tuple(heterogeneous)


def count_workers(axes: Sequence[PlannedAxis]) -> int:
    """Return the number of workers of a mesh."""
    return prod(axis.size for axis in axes)


def format_mesh(axes: Sequence[PlannedAxis]) -> str:
    """Return a mesh as on a command line."""
    return ",".join(f"{axis.name}={axis.size}" for axis in axes)


def require_workers(axes: Sequence[PlannedAxis], workers: int) -> None:
    """Raise `ConfigError` if a mesh is not that of so many workers."""
    if axes and count_workers(axes) != workers:
        raise ConfigError(
            expected=f"{count_workers(axes)} workers, the product of the axes of the mesh {format_mesh(axes)}",
            found=workers,
            fix=f"set -n {count_workers(axes)}, or change --mesh; on several hosts all workers together count",
        )

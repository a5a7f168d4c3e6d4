"""How a batch is divided between the workers of a mesh: the one rule that loaders and jobs follow.

Note [batch division]: the axes of the mesh with the roles `data` and `expert` divide the rows of a batch, from the
outermost, each what the axes before it leave. The rows of one part are consecutive, in the order of workers, and the
first parts have one row more if the parts cannot be equal. Workers that differ by their rank along other axes have the
same rows. A batch with fewer rows than parts is not divided.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rankless.parallel.mesh import Mesh, MeshAxis
from rankless.parallel.tensor_placement import split_lengths


@dataclass(frozen=True, kw_only=True)
class BatchDivision:
    """The division of batches on a mesh, and this worker's part; see Note [batch division].

    Attributes:
        sizes (tuple[int, ...]): The sizes of the axes that divide a batch, from the outermost.
        ranks (tuple[int, ...]): This worker's rank along each of them.
        parts_of_workers (tuple[int, ...]): For each worker of the mesh the number of its part.
    """

    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    parts_of_workers: tuple[int, ...]

    @classmethod
    def of(cls, mesh: Mesh) -> "BatchDivision":
        """Return the division of a mesh: see Note [batch division]."""
        axes = list_batch_axes(mesh)
        sizes, ranks = tuple(axis.size for axis in axes), tuple(axis.rank for axis in axes)
        along = ([mesh.find_rank_along(axis, worker) for axis in axes] for worker in range(mesh.size))
        return cls(sizes=sizes, ranks=ranks, parts_of_workers=tuple(_number_part(sizes, each) for each in along))

    @property
    def count(self) -> int:
        """The number of parts."""
        return math.prod(self.sizes)

    @property
    def own_part(self) -> int:
        """The number of this worker's part."""
        return _number_part(self.sizes, self.ranks)

    def divides(self, rows: int) -> bool:
        """Whether a batch of so many rows is divided."""
        return rows >= self.count

    def split(self, rows: int) -> tuple[int, ...]:
        """Return the number of rows of each part."""
        lengths: tuple[int, ...] = (rows,)
        for size in self.sizes:
            lengths = tuple(part for length in lengths for part in split_lengths(length, size))
        return lengths

    def find_lengths_along_axes(self, lengths: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return for each axis the lengths into which it divides what the axes before it leave to this worker.

        Args:
            lengths: The number of rows of each part.
        """
        found = []
        for size, rank in zip(self.sizes, self.ranks, strict=True):
            count = len(lengths) // size
            blocks = [lengths[start : start + count] for start in range(0, len(lengths), count)]
            found.append(tuple(block[0] if count == 1 else sum(block) for block in blocks))
            lengths = blocks[rank]
        return found


def divides_batches(axis: MeshAxis) -> bool:
    """Return whether an axis divides batches."""
    return axis.role in ("data", "expert")


def list_batch_axes(mesh: Mesh) -> list[MeshAxis]:
    """Return the axes of a mesh that divide batches, from the outermost."""
    return [axis for axis in mesh.axes if divides_batches(axis)]


def _number_part(sizes: Sequence[int], ranks: Sequence[int]) -> int:
    """Return the number of the part of a worker, from its ranks along the axes that divide batches."""
    number = 0
    for size, rank in zip(sizes, ranks, strict=True):
        number = number * size + rank
    return number

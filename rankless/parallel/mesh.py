"""The mesh: the workers of a job, its axes, and the rank of this process. The runtime passes it down.

Note [axes]: workers are arranged along named axes, as the points of a grid: with the axes `data=2, tensor=4` worker 6
has rank 1 along `data` and rank 2 along `tensor`. What a program divides along an axis, it divides between the workers
that have the same ranks along all other axes; they have a process group of their own.
"""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.distributed as dist

DescribeDifference = Callable[[Sequence[str], Mapping[int, bytes]], tuple[str, str] | None]
"""Receives the names of values that differ and each rank's details. Returns what was found and the fix, or None."""


def describe_nothing(_names: Sequence[str], _details: Mapping[int, bytes]) -> tuple[str, str] | None:
    """Return None: the names of the values and the ranks say enough."""
    return None


class SyncPointChecker(Protocol):
    """Detects ranks that have diverged. See `collectives.desync_detection`."""

    number: int
    """The number of the last sync point."""

    def check_sync_point(
        self,
        text: str,
        *,
        names: Callable[[], Sequence[str]] = tuple,
        digests: Sequence[int] = (),
        remark: str = "",
        details: bytes = b"",
        describe: DescribeDifference = describe_nothing,
    ) -> None:
        """Publish this rank's sync point, and raise `RanksDiverged` if another rank is at a different one."""
        ...

    def check_again(self) -> None:
        """Raise `RanksDiverged` if a rank that has arrived meanwhile is at a different sync point."""
        ...

    def have_reached(self, number: int, ranks: Container[int]) -> bool:
        """Return whether those of some ranks that are on this host have posted a sync point, or a later one."""
        ...

    def end(self) -> None:
        """Check the last sync point, the end of the script."""
        ...


AxisRole = Literal["data", "tensor", "sequence", "expert", "pipeline"]
"""What is divided along an axis: rows of the batch, parameters, positions of a sequence, experts, or layers."""


class WorkerGroup(Protocol):
    """Workers that call collectives together: a mesh, or those along one axis."""

    @property
    def rank(self) -> int:
        """The place of this process among them."""
        ...

    @property
    def size(self) -> int:
        """Their number."""
        ...

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Their process group; None for a simulated group, or one of a single process."""
        ...


@dataclass(frozen=True, kw_only=True)
class MeshAxis:
    """The workers that differ from this one by their rank along one axis only; see Note [axes]."""

    name: str
    role: AxisRole
    rank: int
    size: int
    group: dist.ProcessGroup | None = None
    stage_workers: tuple[tuple[int, ...], ...] = ()
    """The workers of each stage, where several take its microbatches in turns: heterogeneous workers."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """All workers of a job.

    With one process `group` is None, and Rankless calls no collective.
    """

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    desync_detector: SyncPointChecker | None = None
    axes: tuple[MeshAxis, ...] = ()
    """The axes, from the outermost: all workers along an axis `data` if none are given."""

    def __post_init__(self) -> None:
        if not self.axes:
            axis = MeshAxis(name="data", role="data", rank=self.rank, size=self.size, group=self.group)
            object.__setattr__(self, "axes", (axis,))

    def find_rank_along(self, axis: WorkerGroup, rank: int) -> int:
        """Return the rank along an axis of any worker of the mesh; see Note [axes]."""
        return rank // self._find_stride(axis) % axis.size

    def list_ranks_along(self, axis: WorkerGroup) -> list[int]:
        """Return the ranks in the mesh of the workers along an axis; see Note [axes]."""
        stride = self._find_stride(axis)
        first = self.rank - axis.rank * stride
        return [first + place * stride for place in range(axis.size)]

    def _find_stride(self, axis: WorkerGroup) -> int:
        """Return how far the ranks in the mesh of neighbours along an axis are apart."""
        number = next(number for number, known in enumerate(self.axes) if known is axis)
        return math.prod(inner.size for inner in self.axes[number + 1 :])

    def check_sync_point(
        self,
        text: str,
        *,
        names: Callable[[], Sequence[str]] = tuple,
        digests: Sequence[int] = (),
        remark: str = "",
        details: bytes = b"",
        describe: DescribeDifference = describe_nothing,
    ) -> None:
        """Check that all ranks reach the same sync point. A rank does not wait for slower ranks.

        Args:
            text: Names the sync point. It must be the same on all ranks.
            names: Returns the names of the values that must be equal on all ranks.
            digests: A digest of each of these values.
            remark: Describes this rank, for the error.
            details: What `describe` needs of this rank.
            describe: Describes values that differ, from the details of all ranks.

        Raises:
            RanksDiverged: If another rank is at a different sync point, or its digests differ.
        """
        if self.desync_detector is not None:
            self.desync_detector.check_sync_point(
                text, names=names, digests=digests, remark=remark, details=details, describe=describe
            )

    def check_sync_point_again(self) -> None:
        """Check the last sync point again, without waiting.

        A job calls it after its collectives, when the other ranks have arrived, and after an exception.

        Raises:
            RanksDiverged: If a rank that has arrived meanwhile is at a different sync point.
        """
        if self.desync_detector is not None:
            self.desync_detector.check_again()

    @staticmethod
    def solo(device: torch.device | str = "cpu") -> "Mesh":
        """Return the mesh of a script that runs as a single process."""
        return Mesh(rank=0, size=1, device=torch.device(device))


STATE_ROLES: tuple[AxisRole, ...] = ("tensor", "expert", "pipeline", "data")
"""The roles of axes along which states can be divided, in the order in which they divide a tensor."""


def list_state_axes(mesh: Mesh) -> list[MeshAxis]:
    """Return the axes of a mesh that can divide parameters, gradients and optimizer state, in the order they do it."""
    found = [find_axis(mesh, role) for role in STATE_ROLES]
    return [axis for axis in found if axis is not None]


def find_pipeline_axis(mesh: Mesh) -> MeshAxis | None:
    """Return the axis of a mesh that divides layers; None if there is none."""
    return find_axis(mesh, "pipeline")


def list_layer_axes(mesh: Mesh) -> list[MeshAxis]:
    """Return the axes of a mesh that divide what is in a layer, its features and experts, in the order they do it.

    Programs take parameters in the shards into which these axes divide them.
    """
    return [axis for axis in list_state_axes(mesh) if axis.role in ("tensor", "expert")]


def find_axis(mesh: Mesh, role: AxisRole) -> MeshAxis | None:
    """Return the first axis of a mesh with a role; None if there is none."""
    return next((axis for axis in mesh.axes if axis.role == role), None)

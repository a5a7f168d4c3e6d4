"""The mesh: the processes of a job and the rank of this one. The runtime passes it down; nobody looks it up."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist


class SyncPointChecker(Protocol):
    """Detects ranks that have diverged. See `collectives.desync_detection`."""

    def check_sync_point(
        self,
        text: str,
        *,
        names: Callable[[], Sequence[str]] = tuple,
        digests: Sequence[int] = (),
        remark: str = "",
    ) -> None:
        """Publish this rank's sync point, and raise `RanksDiverged` if another rank is at a different one."""
        ...

    def end(self) -> None:
        """Check the last sync point, the end of the script."""
        ...


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The workers of a job along one axis named "data".

    With one process `group` is None, and Rankless calls no collective.
    """

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    desync_detector: SyncPointChecker | None = None

    def check_sync_point(
        self,
        text: str,
        *,
        names: Callable[[], Sequence[str]] = tuple,
        digests: Sequence[int] = (),
        remark: str = "",
    ) -> None:
        """Check that all ranks reach the same sync point. A rank does not wait for slower ranks.

        Args:
            text: Names the sync point. It must be the same on all ranks.
            names: Returns the names of the values that must be equal on all ranks.
            digests: A digest of each of these values.
            remark: Describes this rank, for the error.

        Raises:
            RanksDiverged: If another rank is at a different sync point, or its digests differ.
        """
        if self.desync_detector is not None:
            self.desync_detector.check_sync_point(text, names=names, digests=digests, remark=remark)

    @staticmethod
    def solo(device: torch.device | str = "cpu") -> "Mesh":
        """Return the mesh of a script that runs as a single process."""
        return Mesh(rank=0, size=1, device=torch.device(device))

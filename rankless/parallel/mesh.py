"""The mesh: which processes take part, and who this one is. Handed down by the runtime, never looked up."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist


class SyncPointChecker(Protocol):
    """What tells ranks that have parted: see `collectives.desync_detection`."""

    def check_sync_point(
        self,
        text: str,
        *,
        names: Callable[[], Sequence[str]] = tuple,
        digests: Sequence[int] = (),
        remark: str = "",
    ) -> None:
        """Note where this rank is; raise if another is known to be elsewhere."""
        ...

    def end(self) -> None:
        """Note that this rank's script is over."""
        ...


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The workers of a job along one axis called "data".

    `group` is None when the mesh has one process: then no collective is ever called.
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
        """Say that this rank has come to a place where all ranks must meet; raises `RanksDiverged` if another is not
        there. `digests` are of what must be equal, `names` gives their names, and `remark` says more of this rank.
        """
        if self.desync_detector is not None:
            self.desync_detector.check_sync_point(text, names=names, digests=digests, remark=remark)

    @staticmethod
    def solo(device: torch.device | str = "cpu") -> "Mesh":
        """The mesh of a script that runs alone."""
        return Mesh(rank=0, size=1, device=torch.device(device))

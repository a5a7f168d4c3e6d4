"""The mesh: which processes take part, and who this one is. Handed down by the runtime, never looked up."""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The workers of a job along one axis called "data".

    `group` is None when the mesh has one process: then no collective is ever called.
    """

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = None

    @staticmethod
    def solo(device: torch.device | str = "cpu") -> "Mesh":
        """The mesh of a script that runs alone."""
        return Mesh(rank=0, size=1, device=torch.device(device))

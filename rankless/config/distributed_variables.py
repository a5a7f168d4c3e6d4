"""A process of a foreign launcher, as its environment variables describe it."""

from typing import Literal

import msgspec


class TorchrunWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A process that torchrun, or a launcher like it, has started."""

    launcher: Literal["torchrun", "mpirun", "srun", "Kubernetes"] = "torchrun"
    rank: int
    """-1 if it is not set."""
    world_size: int
    """0 if it is not set."""
    local_rank: int
    threads: int | None
    master_address: str | None
    """None: the launcher sets no address for the rendezvous."""
    master_port: int
    has_store: bool
    """Whether the launcher itself serves the store at that address."""

    @property
    def is_complete(self) -> bool:
        """Whether the launcher sets both rank and world size."""
        return self.rank >= 0 and self.world_size > 0

"""What the core knows of a process that another system's launcher has started. Extensions implement it."""

from collections.abc import Callable
from typing import Any, Protocol


class LaunchedWorker(Protocol):
    """One process of a job, as its launcher's environment variables describe it."""

    @property
    def rank(self) -> int:
        """Its rank."""
        ...

    @property
    def world_size(self) -> int:
        """The number of processes of the job."""
        ...

    def join(self, notify: Callable[[str], None]) -> Any:
        """Wait for the other ranks, and return the `RendezvousInfo` of this process. Raises `JoinError`."""
        ...

"""The process that starts the workers of a host, and its substitute on a host that has no workers."""

import os
import socket
from typing import Protocol

from rankless.records.events import open_channel


class WorkerParent(Protocol):
    """The process that starts the workers of a host, as the supervisor sees it.

    Attributes:
        records: The socket from which the records of workers are read. It does not block.
    """

    records: socket.socket

    @property
    def process_id(self) -> int:
        """The id of the process."""
        ...

    def poll(self) -> int | None:
        """Return the exit code of the process, or None while it runs."""
        ...

    def send(self, command: bytes) -> None:
        """Send a command of `runtime.fork_server_protocol`."""
        ...

    def wake(self) -> None:
        """Continue the process if a signal has stopped it."""
        ...

    def close(self, *, timeout_seconds: float, spare: frozenset[int] = frozenset()) -> None:
        """End all processes of the run but those in `spare`."""
        ...


class NoWorkers:
    """Stands for the parent of workers on a host that has none: it has ended in order, and no record arrives."""

    def __init__(self) -> None:
        self.records, self._writer = open_channel()
        self.records.setblocking(False)

    @property
    def process_id(self) -> int:
        """The id of this process, which lives as long as the run."""
        return os.getpid()

    def poll(self) -> int:
        """Return 0: no worker is left."""
        return 0

    def send(self, command: bytes) -> None:
        """Do nothing."""

    def wake(self) -> None:
        """Do nothing."""

    def close(self, *, timeout_seconds: float, spare: frozenset[int] = frozenset()) -> None:  # noqa: ARG002  # the protocol's signature
        """Close the channel. There is no process to end."""
        self.records.close()
        self._writer.close()

"""Whether the other processes of a group are alive: by pidfd, or by process id and start time."""

import os
import select
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessIdentity:
    """A process: its id, and its start in clock ticks since boot, because ids are used again."""

    process_id: int
    start_ticks: int

    @classmethod
    def own(cls) -> "ProcessIdentity":
        """Return the identity of the calling process."""
        process_id = os.getpid()
        return cls(process_id, _read_start(process_id) or 0)

    @property
    def is_alive(self) -> bool:
        """Whether the process lives. A zombie does not."""
        return _read_start(self.process_id) == self.start_ticks


class PeerProcesses:
    """The other processes of a group.

    Args:
        identities: The processes by rank.
        use_descriptors: Whether to open a pidfd for each. Default: True; without pidfds `/proc` is read.
    """

    def __init__(self, identities: Mapping[int, ProcessIdentity], *, use_descriptors: bool = True) -> None:
        self._identities = dict(identities)
        self._ranks: dict[int, int] = {}
        self._poll = select.poll()
        # Several threads of a rank may wait, and a poll object takes one at a time.
        self._lock = threading.Lock()
        for rank, identity in identities.items():
            descriptor = _open_descriptor(identity) if use_descriptors else None
            if descriptor is not None:
                self._ranks[descriptor] = rank
                self._poll.register(descriptor, select.POLLIN)

    def find_ended(self) -> set[int]:
        """Return the ranks whose processes have ended."""
        with self._lock:
            ended = {self._ranks[descriptor] for descriptor, _ in self._poll.poll(0)} if self._ranks else set()
            known = set(self._ranks.values())
            return ended | {rank for rank, one in self._identities.items() if rank not in known and not one.is_alive}

    def close(self) -> None:
        """Close all descriptors. No process counts as ended afterwards."""
        with self._lock:
            ranks, self._ranks, self._identities = self._ranks, {}, {}
            for descriptor in ranks:
                self._poll.unregister(descriptor)
                os.close(descriptor)


def _open_descriptor(identity: ProcessIdentity) -> int | None:
    """Return a pidfd of the process; None if there are none here, or the process has ended."""
    if not hasattr(os, "pidfd_open"):
        return None
    with suppress(OSError):
        descriptor = os.pidfd_open(identity.process_id)
        # The id may belong to a later process.
        if identity.is_alive:
            return descriptor
        os.close(descriptor)
    return None


def _read_start(process_id: int) -> int | None:
    """Return the start time of a living process in clock ticks; None if it has ended."""
    try:
        with open(f"/proc/{process_id}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])

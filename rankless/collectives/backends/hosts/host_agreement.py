"""The comparison of a call over the ranks of all hosts, for calls whose values do not carry it."""

from typing import Any

import torch

from rankless.collectives.backends.hosts.host_waits import HostWaits
from rankless.collectives.backends.hosts.leader_exchange import LeaderExchange
from rankless.collectives.backends.shared_group import SharedGroup


class HostAgreement:
    """The steps by which all ranks of a group find out that they make the same call.

    Args:
        waits: How long to wait.
        local: The shared memory of this rank's host; None for a rank that is alone on its host.
        leaders: Connects the first ranks of the hosts; None for other ranks.
    """

    def __init__(self, waits: HostWaits, *, local: SharedGroup | None, leaders: LeaderExchange | None) -> None:
        self._waits, self._local, self._leaders = waits, local, leaders

    def agree(self, signature: int) -> None:
        """Return when all ranks have made the call. Raises `CollectiveError` on all if a rank makes another."""
        self.compare_within_host(signature)
        if self._leaders is not None:
            self._leaders.compare(signature, self._wait)
        self.release()

    def compare_within_host(self, signature: int) -> None:
        """Let the first rank of this host compare the calls of the host's ranks. The others do not wait for it."""
        if self._local is not None:
            with self._waits.wait_for_host():
                self._local.movement.compare_calls(signature, 0)

    def release(self) -> None:
        """Return when the first rank of this host calls this: it knows then that all hosts make the call."""
        if self._local is not None:
            with self._waits.wait_for_host(graces=2):
                self._local.movement.broadcast(torch.zeros(1, dtype=torch.uint8, device="cpu"), 0)

    def _wait(self, work: Any) -> None:
        assert self._leaders is not None
        self._waits.wait_for_hosts(self._leaders.exchange, work, members_wait=True)

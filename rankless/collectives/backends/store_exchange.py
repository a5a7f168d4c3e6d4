"""What the processes of a group tell each other through a torch `Store` before they share memory."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from rankless.errors import CollectiveError

_FIRST_SLEEP_SECONDS = 0.0002
_LONGEST_SLEEP_SECONDS = 0.005


class StoreExchange:
    """Messages of the ranks of one group under one prefix of a store.

    Args:
        store: A `torch.distributed.Store` that all ranks share.
        prefix: Separates the keys from those of other exchanges.
        rank: This process's rank in the group.
        size: The number of ranks.
        timeout: How long to wait for a message.
        purpose: What all ranks are to do, for the error of a rank that waits in vain.
        check: Called while waiting. It raises if another process has ended.
    """

    def __init__(
        self,
        store: Any,
        prefix: str,
        *,
        rank: int,
        size: int,
        timeout: timedelta,
        purpose: str = "open its shared memory",
    ) -> None:
        self._store, self._prefix, self.rank, self.size, self._purpose = store, prefix, rank, size, purpose
        self._timeout_seconds = timeout.total_seconds()
        self._timeout = timeout
        self.check: Callable[[], None] = do_nothing

    def derive(self, name: str) -> "StoreExchange":
        """Return an exchange of the same ranks with keys of its own."""
        derived = StoreExchange(
            self._store, f"{self._prefix}/{name}", rank=self.rank, size=self.size, timeout=self._timeout
        )
        derived.check = self.check
        return derived

    def publish(self, key: str, value: str) -> None:
        """Set this rank's value of a key. Each rank has its own."""
        self._store.set(self._name(key, self.rank), value)

    def wait_for(self, key: str, rank: int) -> str:
        """Return a rank's value of a key, as soon as it has published one.

        Raises:
            CollectiveError: There is none within the timeout.
        """
        name, start, sleep_seconds = self._name(key, rank), time.monotonic(), _FIRST_SLEEP_SECONDS
        while not self._store.check([name]):
            self.check()
            if time.monotonic() - start > self._timeout_seconds:
                raise CollectiveError(
                    expected=f"all {self.size} ranks of the group to {self._purpose}",
                    found=f"rank {rank} of the group did not within {self._timeout_seconds:g} s",
                    fix="make every rank make the same calls, and see if the process is stopped or has ended",
                )
            time.sleep(sleep_seconds)
            sleep_seconds = min(1.5 * sleep_seconds, _LONGEST_SLEEP_SECONDS)
        return bytes(self._store.get(name)).decode()

    def have_all(self, key: str) -> bool:
        """Return whether all ranks have published a value of a key."""
        return bool(self._store.check([self._name(key, rank) for rank in range(self.size)]))

    def list_missing(self, key: str) -> list[int]:
        """Return the ranks that have published no value of a key."""
        return [rank for rank in range(self.size) if not self._store.check([self._name(key, rank)])]

    def gather(self, key: str, value: str) -> list[str]:
        """Publish a value, and return the values of all ranks. Raises as `wait_for`."""
        self.publish(key, value)
        return [self.wait_for(key, rank) for rank in range(self.size)]

    def _name(self, key: str, rank: int) -> str:
        return f"{self._prefix}/{key}/{rank}"


def do_nothing() -> None:
    """Do nothing: the check of a caller that knows nothing of other processes."""

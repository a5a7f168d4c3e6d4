"""The first failure of a group. All its ranks read it from the store, because only one host can see what happened."""

import json
import threading
import time
from typing import Any

from rankless.errors import CollectiveError

_KEY = "first failure"
_STORE_SECONDS = 2.0
"""How long a rank waits for the store. Its server may be gone, or unreachable."""
WITNESS_SECONDS = 0.3
"""How long a rank that has only lost a connection waits for one that knows why."""
_POLL_SECONDS = 0.02


class FirstFailure:
    """What ended a group.

    Args:
        store: A store with keys of its own for this group.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def report(self, error: CollectiveError, *, wait_seconds: float) -> CollectiveError:
        """Return the error that all ranks raise: the first that a rank has reported.

        Args:
            error: What this rank has found.
            wait_seconds: How long others that know more may report first.
        """
        found: list[str] = []
        thread = threading.Thread(
            target=self._exchange, args=(error, wait_seconds, found), name="rankless-failure", daemon=True
        )
        thread.start()
        thread.join(_STORE_SECONDS)
        first = json.loads(found[0]) if found else None
        if first is None or first["found"] == error.found:
            return error
        return CollectiveError(expected=first["expected"], found=first["found"], fix=first["fix"])

    def _exchange(self, error: CollectiveError, wait_seconds: float, found: list[str]) -> None:
        try:
            deadline = time.monotonic() + wait_seconds
            while time.monotonic() < deadline and not self._store.check([_KEY]):
                time.sleep(_POLL_SECONDS)
            own = json.dumps({"expected": str(error.expected), "found": str(error.found), "fix": error.fix})
            found.append(bytes(self._store.compare_set(_KEY, "", own)).decode())
        except RuntimeError:
            return  # rank 0, which serves the store, is gone

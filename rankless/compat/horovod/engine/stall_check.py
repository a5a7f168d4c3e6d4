"""A watch on operations that some ranks have submitted and others have not: told on rank 0, and ended if asked."""

import sys
from collections.abc import Callable

from rankless.compat.horovod.engine.coordinator import Coordinator

LOOK_SECONDS = 1.0


def print_to_errors(text: str) -> None:
    """Tell the user."""
    print(text, file=sys.stderr, flush=True)


class Stalls:
    """Looks every second; warns after `warn_seconds` (0: never), and after as long again, and gives up after
    `shutdown_seconds` (0: never).
    """

    def __init__(
        self, *, warn_seconds: float, shutdown_seconds: float, tell: Callable[[str], None] = print_to_errors
    ) -> None:
        self._warn_seconds = warn_seconds
        self._shutdown_seconds = shutdown_seconds
        self._tell = tell
        self._looked = 0.0
        self._told = 0.0

    def look(self, coordinator: Coordinator, now: float) -> str | None:
        """Tell what stalls. What to end the job with, if it has stalled for too long."""
        if not self._warn_seconds or now - self._looked < min(LOOK_SECONDS, self._warn_seconds):
            return None
        self._looked = now
        if now - self._told >= self._warn_seconds:
            missing = coordinator.stalled(before=now - self._warn_seconds)
            if missing:
                self._told = now
                self._tell(_warning(missing, self._warn_seconds))
        if self._shutdown_seconds:
            missing = coordinator.stalled(before=now - self._shutdown_seconds)
            if missing:
                return f"Stalled for more than {self._shutdown_seconds:g} seconds.{_missing_text(missing)}"
        return None


def _warning(missing: dict[int, list[str]], seconds: float) -> str:
    return (
        "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are waiting "
        f"for remainder of ranks for more than {seconds:g} seconds. This may indicate that different ranks are trying "
        "to submit different tensors or that only subset of ranks is submitting tensors, which will cause deadlock. "
        + _missing_text(missing)
    )


def _missing_text(missing: dict[int, list[str]]) -> str:
    lines = [f"{rank}: [{', '.join(sorted(keys))}]" for rank, keys in missing.items()]
    return "\nMissing ranks:\n" + "\n".join(lines)
